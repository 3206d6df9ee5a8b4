// What the parts of the stand-in for CANN's runtime share. CANN's own declarations come from the headers in torch_npu's wheel.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>

#include "acl/acl.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace standin {

struct Block {  // one allocation in a device's memory
  char *low;
  size_t bytes;
  int device;
};

using Work = std::function<aclError()>;

extern std::recursive_mutex lock;  // one for everything: the stand-in is for tests, not for speed

const char *setting(const char *name, const char *otherwise);  // an environment variable
bool tracing();
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));
aclError failed(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));  // kept for aclGetRecentErrMsg

int devices();        // how many there are
int current_device();  // of this thread; -1: none was set
int device_of(const void *address);  // whose memory it is; -1: no device's
bool find_block(const void *address, Block *found);
void memory_in_use(int device, char **low, char **high);  // all that was ever given out

// Puts work at the end of a stream's queue. What it returns is what the next wait for the stream returns, and from then on
// every wait and every enqueue where the stream stops at a failure, as those of torch_npu do.
aclError enqueue(aclrtStream stream, const char *what, Work work);
int device_of_stream(aclrtStream stream);
void finish_device(int device);  // does all that is queued there

}  // namespace standin

// For the other libraries of the stand-in.
EXPORT void standin_enqueue(aclrtStream stream, const char *what, standin::Work *work);
EXPORT int64_t standin_launches();  // kernels launched so far
EXPORT int standin_skip(int on);     // whether kernels do nothing from now on; before this
EXPORT int64_t standin_operators();  // aclnn and aten operators enqueued so far
EXPORT void standin_count_operator();
EXPORT int standin_missing(const char *name);  // says that a function has no stand-in
EXPORT int standin_ignored(const char *name);  // a function without effect here
