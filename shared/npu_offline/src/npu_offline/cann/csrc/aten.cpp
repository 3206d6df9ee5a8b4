// Other operators of `npu` tensors: PyTorch's own CPU kernels on the device's memory, as work of the current stream, in place of
// torch_npu's, which call CANN's. What torch_npu does with memory, devices, streams and copies stays its own.
//
// The result's shape comes from PyTorch's meta kernels. An operator that has none, or whose shape or value depends on data, or
// that draws random numbers, runs at once on copies, and waits for the stream.
#include <ATen/ATen.h>
#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include "standin.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"

using c10::IValue;
using torch::jit::Stack;

namespace {
const c10::DispatchKeySet ABOVE =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
    c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher,
                         c10::DispatchKey::Functionalize});

const c10::DispatchKeySet WITHIN(c10::DispatchKey::BackendSelect);

using Change = std::function<at::Tensor(const at::Tensor &)>;

// An argument or result with every tensor in it changed; nullopt where it is of a kind that is not known here.
IValue changed(const IValue &value, const Change &change) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (at::Tensor t : value.toTensorList()) list.push_back(t.defined() ? change(t) : t);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> t : value.toOptionalTensorList()) list.push_back(t && t->defined() ? std::optional(change(*t)) : t);
    return list;
  }
  return value;
}
at::Tensor with_number_flag(at::Tensor made, const at::Tensor &like) {
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}
at::Tensor meta_of(const at::Tensor &t) {
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) return t;  // a Python number
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
}
at::Tensor view_of(const at::Tensor &t) {  // of device memory; what is the host's is read now
  if (t.is_cpu()) return with_number_flag(t.clone(), t);
  auto options = at::TensorOptions().dtype(t.scalar_type());
  return t.numel() ? at::from_blob(t.data_ptr(), t.sizes(), t.strides(), options) : at::empty(t.sizes(), options);
}

struct Planned {
  std::vector<IValue> outputs;       // on the device
  std::vector<bool> is_new;          // not one of the arguments
};

// The results, allocated; false where they cannot be known yet.
bool allocate(const c10::OperatorHandle &op, const std::vector<IValue> &arguments, at::Device device, Planned *planned) {
  const auto &schema = op.schema();
  Stack stack;
  for (const IValue &value : arguments)
    stack.push_back(value.isDevice() ? IValue(at::Device(at::kMeta)) : changed(value, meta_of));
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const std::exception &error) {
    standin::trace("no shape: %.300s", error.what());
    return false;
  }
  for (size_t i = 0; i < stack.size(); i++) {
    const auto *alias = schema.returns()[i].alias_info();
    if (alias && !alias->isWrite()) return false;
    if (alias) {
      size_t a = 0;
      while (a < arguments.size() && !(schema.arguments()[a].alias_info() && *schema.arguments()[a].alias_info() == *alias)) a++;
      if (a == arguments.size()) return false;
      if (arguments[a].isTensor() && stack[i].toTensor().sizes() != arguments[a].toTensor().sizes())
        arguments[a].toTensor().resize_(stack[i].toTensor().sizes());
      planned->outputs.push_back(arguments[a]);
      planned->is_new.push_back(false);
    } else if (stack[i].isTensor() || stack[i].isTensorList()) {
      planned->outputs.push_back(changed(stack[i], [&](const at::Tensor &t) {
        return at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
      }));
      planned->is_new.push_back(true);
    } else {
      return false;
    }
  }
  return true;
}

void store(const IValue &target, const IValue &result) {
  if (target.isTensor() && target.toTensor().defined()) target.toTensor().copy_(result.toTensor());
  if (target.isTensorList())
    for (size_t i = 0; i < target.toTensorList().size(); i++) target.toTensorList().get(i).copy_(result.toTensorList().get(i));
}

std::string first_dtype(const std::vector<IValue> &arguments) {
  std::string found = "no tensor";
  for (auto value = arguments.rbegin(); value != arguments.rend(); value++)
    changed(*value, [&](const at::Tensor &t) {
      found = c10::toString(t.scalar_type());
      return t;
    });
  return found;
}

void run(const c10::OperatorHandle &op, Stack *stack) {
  const auto &schema = op.schema();
  const std::string name = c10::toString(op.operator_name());
  standin_count_operator();
  std::vector<IValue> arguments(stack->end() - schema.arguments().size(), stack->end());
  if (standin::tracing()) standin::trace("operator %s, %s", name.c_str(), first_dtype(arguments).c_str());
  std::optional<at::Device> device;
  for (const IValue &value : arguments) {
    if (value.isDevice() && !device) device = value.toDevice();
    changed(value, [&](const at::Tensor &t) {
      if (t.is_privateuseone()) {
        TORCH_CHECK(!device || *device == t.device() || device->index() < 0, name, " of tensors on ", *device, " and ", t.device());
        device = t.device();
      }
      return t;
    });
  }
  c10::impl::ForceDispatchKeyGuard below(WITHIN, ABOVE);
  const bool depends = op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape) ||
                       op.hasTag(at::Tag::nondeterministic_seeded);
  Planned planned;
  c10::OptionalDeviceGuard guard(device);
  if (depends || !device || !allocate(op, arguments, *device, &planned)) {
    standin::trace("operator %s waits", name.c_str());
    at::native::cpu_fallback(op, stack, false, c10::DispatchKey::CPU);
    return;
  }
  Stack inputs;
  for (const IValue &value : arguments) inputs.push_back(value.isDevice() ? IValue(at::Device(at::kCPU)) : changed(value, view_of));
  std::vector<IValue> targets;
  for (size_t i = 0; i < planned.outputs.size(); i++)
    targets.push_back(planned.is_new[i] ? changed(planned.outputs[i], view_of) : IValue());
  standin::Work work = [op, name, inputs, targets]() -> aclError {
    c10::impl::ForceDispatchKeyGuard below(WITHIN, ABOVE);
    at::NoGradGuard no_grad;
    Stack stack = inputs;
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      for (size_t i = 0; i < targets.size(); i++)
        if (!targets[i].isNone()) store(targets[i], stack[i]);
    } catch (const std::exception &error) {
      return standin::failed(ACL_ERROR_INTERNAL_ERROR, "%s: %s", name.c_str(), error.what());
    }
    return ACL_SUCCESS;
  };
  standin_enqueue(c10_npu::getCurrentNPUStream().stream(true), "an operator", &work);
  torch::jit::drop(*stack, arguments.size());
  for (IValue &output : planned.outputs) stack->push_back(std::move(output));
}

int64_t install(c10::List<std::string> names) {
  static auto *library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (std::string name : names) library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
  return names.size();
}
}  // namespace

TORCH_LIBRARY(npu_offline_cann, library) { library.def("install(str[] names) -> int", install); }
