// A device named "second" for tests: tensors in ordinary memory that PyTorch takes for those of another device.
// Every operator runs on a copy on the CPU; operands from two devices are refused, as a GPU would; and random
// operators draw from a generator of the device's own.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <cstdlib>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr auto SECOND = c10::DeviceType::PrivateUse1;

struct Memory final : c10::Allocator {
  static void release(void* pointer) { std::free(pointer); }
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    return {pointer, pointer, &release, c10::Device(SECOND, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Memory memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = memory.allocate(bytes);
    memory.copy_data(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// Nothing runs ahead on this device, so there is never anything to wait for.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<SECOND> {
  static c10::Device device() { return {SECOND, 0}; }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device()); }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

at::Generator& own_generator() {
  static at::Generator generator = at::detail::createCPUGenerator(1234);
  return generator;
}

// The same memory as a tensor on the CPU.
at::Tensor as_cpu(const at::Tensor& x) {
  if (!x.defined() || x.device().is_cpu()) return x;
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU).requires_grad(false));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  if (to.numel()) as_cpu(to).copy_(as_cpu(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (self.sizes() != to.sizes()) at::native::resize_(to, self.sizes());
  return copy_from(self, to, false);
}

at::Scalar item(const at::Tensor& self) { return as_cpu(self).item(); }

at::Tensor back(const at::Tensor& x) { return x.defined() ? x.to(c10::Device(SECOND, 0)) : x; }

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  TORCH_CHECK(weight.device() == x.device(), "Expected all tensors to be on the same device: convolution");
  auto b = bias.has_value() && bias->defined() ? std::optional<at::Tensor>(as_cpu(*bias)) : std::nullopt;
  return back(at::convolution(as_cpu(x), as_cpu(weight), b, stride, padding, dilation, transposed, output_padding,
                              groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  int64_t channels = grad.size(1);
  auto [a, b, c] = at::convolution_backward(as_cpu(grad), as_cpu(x), as_cpu(weight), at::IntArrayRef(&channels, 1),
                                            stride, padding, dilation, transposed, output_padding, groups, mask);
  return {back(a), back(b), back(c)};
}

void refuse_two_devices(const c10::OperatorHandle& op, const at::Tensor& x) {
  // A number may come from the CPU, and so may the indices of a lookup; nothing else.
  const auto& name = op.schema().name();
  bool fine = !x.defined() || x.device().type() == SECOND || x.dim() == 0 || name == "aten::index" ||
              name == "aten::_index_put_impl_" || name == "aten::index_put_";
  TORCH_CHECK(fine, "Expected all tensors to be on the same device, but found second:0 and ", x.device(), " in ", name);
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) refuse_two_devices(op, value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& x : value.toTensorVector()) refuse_two_devices(op, x);
  }
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return at::native::cpu_fallback(op, stack, true);
  auto generator = at::detail::getDefaultCPUGenerator();
  auto outer = generator.get_state();
  generator.set_state(own_generator().get_state());
  at::native::cpu_fallback(op, stack, true);
  own_generator().set_state(generator.get_state());
  generator.set_state(outer);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("unfold", &at::native::unfold);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

at::Tensor get_state() { return own_generator().get_state(); }
void set_state(const at::Tensor& state) { own_generator().set_state(state); }

TORCH_LIBRARY(second_device, m) {
  m.def("get_state() -> Tensor", &get_state);
  m.def("set_state(Tensor state) -> ()", &set_state);
}

struct Register {
  Register() {
    c10::SetAllocator(SECOND, &memory);
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  }
} now;

}  // namespace
