// Lets a CPU build of torch accept "cuda" as the device of fake tensors: a device guard that does nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
}  // namespace
