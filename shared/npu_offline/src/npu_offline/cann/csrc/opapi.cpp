// libopapi: the operators of CANN's aclnn interface without which torch_npu cannot copy, fill and multiply, on PyTorch's CPU
// kernels. Tensors are views of the device's memory, and own none of it.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <vector>

#include "standin.h"

struct aclTensor { at::Tensor view; };
struct aclScalar { at::Scalar value; };
struct aclIntArray { std::vector<int64_t> values; };
struct aclOpExecutor { const char *name; std::function<void()> run; };

static at::ScalarType type_of(aclDataType type) {
  switch (type) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_BF16: return at::kBFloat16;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_INT8: return at::kChar;
    case ACL_UINT8: return at::kByte;
    case ACL_INT16: return at::kShort;
    case ACL_INT32: return at::kInt;
    case ACL_INT64: return at::kLong;
    case ACL_BOOL: return at::kBool;
    case ACL_COMPLEX64: return at::kComplexFloat;
    default: TORCH_CHECK(false, "the stand-in knows no acl data type ", (int)type);
  }
}

EXPORT aclTensor *aclCreateTensor(const int64_t *sizes, uint64_t rank, aclDataType type, const int64_t *strides, int64_t offset,
                                  aclFormat, const int64_t *, uint64_t, void *data) {
  auto dtype = type_of(type);
  char *first = (char *)data + offset * c10::elementSize(dtype);
  return new aclTensor{at::from_blob(first, at::IntArrayRef(sizes, rank), at::IntArrayRef(strides, rank), at::TensorOptions().dtype(dtype))};
}
EXPORT int aclDestroyTensor(const aclTensor *t) { delete t; return 0; }
EXPORT aclScalar *aclCreateScalar(void *value, aclDataType type) {
  return new aclScalar{at::from_blob(value, {}, at::TensorOptions().dtype(type_of(type))).item()};
}
EXPORT int aclDestroyScalar(const aclScalar *s) { delete s; return 0; }
EXPORT aclIntArray *aclCreateIntArray(const int64_t *values, uint64_t n) { return new aclIntArray{{values, values + n}}; }
EXPORT int aclDestroyIntArray(const aclIntArray *a) { delete a; return 0; }
EXPORT int aclDestroyAclOpExecutor(aclOpExecutor *e) { delete e; return 0; }

static int plan(const char *name, uint64_t *workspace, aclOpExecutor **executor, std::function<void()> run) {
  *workspace = 0;
  *executor = new aclOpExecutor{name, std::move(run)};
  return 0;
}
static int start(aclOpExecutor *executor, aclrtStream stream) {
  standin_count_operator();
  standin::trace("operator %s", executor->name);
  standin::Work work = [name = executor->name, run = std::move(executor->run)]() -> aclError {
    at::NoGradGuard guard;
    try {
      run();
    } catch (const std::exception &error) {
      return standin::failed(ACL_ERROR_INTERNAL_ERROR, "%s: %s", name, error.what());
    }
    return ACL_SUCCESS;
  };
  delete executor;
  standin_enqueue(stream, "an operator", &work);
  return 0;
}
// Factors narrower than the result, which PyTorch's CPU kernels do not take: products are summed up in fp32.
static at::Tensor accumulated(const at::Tensor &a) { return a.scalar_type() == at::kDouble ? a : a.to(at::kFloat); }

// An operator is planned with its tensors, which are destroyed before it starts; so the plan keeps the views.
#define START(name) EXPORT int aclnn##name(void *, uint64_t, aclOpExecutor *e, aclrtStream s) { return start(e, s); }
#define PLAN uint64_t *w, aclOpExecutor **e

EXPORT int aclnnInplaceCopyGetWorkspaceSize(const aclTensor *a, const aclTensor *b, PLAN) {
  return plan("InplaceCopy", w, e, [a = a->view, b = b->view] { a.copy_(b); });
}
START(InplaceCopy)
EXPORT int aclnnInplaceZeroGetWorkspaceSize(const aclTensor *a, PLAN) {
  return plan("InplaceZero", w, e, [a = a->view] { a.zero_(); });
}
START(InplaceZero)
EXPORT int aclnnInplaceFillScalarGetWorkspaceSize(const aclTensor *a, const aclScalar *s, PLAN) {
  return plan("InplaceFillScalar", w, e, [a = a->view, s = s->value] { a.fill_(s); });
}
START(InplaceFillScalar)
EXPORT int aclnnMmGetWorkspaceSize(const aclTensor *a, const aclTensor *b, aclTensor *o, int8_t, PLAN) {
  return plan("Mm", w, e, [a = a->view, b = b->view, o = o->view] { o.copy_(at::mm(accumulated(a), accumulated(b))); });
}
START(Mm)
EXPORT int aclnnMatmulGetWorkspaceSize(const aclTensor *a, const aclTensor *b, aclTensor *o, int8_t, PLAN) {
  return plan("Matmul", w, e, [a = a->view, b = b->view, o = o->view] { o.copy_(at::matmul(accumulated(a), accumulated(b))); });
}
START(Matmul)
static at::Tensor add_product(const at::Tensor &c, const at::Tensor &a, const at::Tensor &b, const at::Scalar &beta, const at::Scalar &alpha) {
  return at::addmm(accumulated(c), accumulated(a), accumulated(b), beta, alpha);
}
EXPORT int aclnnAddmmGetWorkspaceSize(const aclTensor *c, const aclTensor *a, const aclTensor *b, const aclScalar *beta,
                                      const aclScalar *alpha, aclTensor *o, int8_t, PLAN) {
  return plan("Addmm", w, e, [c = c->view, a = a->view, b = b->view, beta = beta->value, alpha = alpha->value, o = o->view] {
    o.copy_(add_product(c, a, b, beta, alpha));
  });
}
START(Addmm)
EXPORT int aclnnInplaceAddmmGetWorkspaceSize(aclTensor *c, const aclTensor *a, const aclTensor *b, const aclScalar *beta,
                                             const aclScalar *alpha, int8_t, PLAN) {
  return plan("InplaceAddmm", w, e, [c = c->view, a = a->view, b = b->view, beta = beta->value, alpha = alpha->value] {
    c.copy_(add_product(c, a, b, beta, alpha));
  });
}
START(InplaceAddmm)
