from tqdm import tqdm as tqdm
