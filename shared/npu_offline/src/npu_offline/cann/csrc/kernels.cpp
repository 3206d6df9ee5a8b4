// What triton-ascend's driver takes from CANN's libruntime. A "binary" is what the stand-in compiler wrote: a line with the
// kernel's name, a letter for each argument, the bytes of workspace of a program, the number of locks, and why it is not the
// final module, if it is not; then a shared object of this host with the kernel's programs. They run through npu_offline's
// runtime, which checks every access to global memory.
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "launch.h"
#include "runtime/runtime/rt.h"
#include "standin.h"

using namespace standin;

namespace {
constexpr rtError_t INVALID = 107000, INTERNAL = 507000, OUTSIDE = 507899, EXCEPTION = 507015;

using Runner = int (*)(void *, const void *, const range *, const int64_t *, int64_t, const range *, int64_t, const int32_t *,
                       const settings *, counts *, fault *, char *);  // npu_offline_launch

struct Function { void *entry = nullptr; std::string name, arguments; size_t workspace = 0, locks = 0; };
struct Launch {
  Function function;
  std::vector<int64_t> slots;
  std::vector<range> ranges;
  int32_t grid[3];
};
std::map<const void *, Function> functions;
std::atomic<int64_t> launches{0};
char flags[4096];  // where cores signal each other

Runner runner() {
  static Runner found = [] {
    // A process has one runtime: kernels would call the functions of the first, whichever of several launched them.
    if (void *loaded = dlsym(RTLD_DEFAULT, "npu_offline_launch")) return (Runner)loaded;
    void *library = dlopen(setting("NPU_OFFLINE_CANN_RUNTIME", ""), RTLD_NOW | RTLD_GLOBAL);
    return library ? (Runner)dlsym(library, "npu_offline_launch") : nullptr;
  }();
  return found;
}

std::atomic<int> skipping{*setting("NPU_OFFLINE_CANN_SKIP", "") != 0};  // to measure the host alone

aclError run(const Launch &l) {
  const settings given = {.threads = atoll(setting("NPU_OFFLINE_CANN_THREADS", "1")), .seconds = 60, .poison = 0xff};
  std::vector<int64_t> rows(l.ranges.size());
  std::vector<counts> counters(l.ranges.size());
  fault found{};
  static thread_local char notes[1 << 16];  // of the machine that runs final modules
  notes[0] = 0;
  if (!runner()(l.function.entry, l.slots.data(), l.ranges.data(), rows.data(), l.ranges.size(), nullptr, 0, l.grid, &given,
                counters.data(), &found, notes))
    return ACL_SUCCESS;
  if (notes[0]) return failed(EXCEPTION, "kernel %s: %.400s", l.function.name.c_str(), notes);
  return failed(EXCEPTION, "kernel %s: program (%ld, %ld, %ld) %s argument %ld at %#lx, %ld bytes, which is outside (reason %ld)",
                l.function.name.c_str(), found.program[0], found.program[1], found.program[2], found.access ? "wrote" : "read",
                found.argument, found.address, found.bytes, found.reason);
}
}  // namespace

EXPORT int64_t standin_launches() { return launches; }
EXPORT int standin_skip(int on) { return skipping.exchange(on); }

EXPORT rtError_t rtSetDevice(int32_t device) { return aclrtSetDevice(device); }
EXPORT rtError_t rtGetSocVersion(char *version, uint32_t bytes) { snprintf(version, bytes, "%s", aclrtGetSocName()); return 0; }
EXPORT rtError_t rtGetAiCoreCount(uint32_t *count) {
  int64_t value = 0;
  aclrtGetDeviceInfo(0, ACL_DEV_ATTR_CUBE_CORE_NUM, &value);
  *count = (uint32_t)value;
  return 0;
}
EXPORT rtError_t rtStreamCreate(rtStream_t *stream, int32_t) { return aclrtCreateStream(stream); }
EXPORT rtError_t rtStreamDestroy(rtStream_t stream) { return aclrtDestroyStream(stream); }
EXPORT rtError_t rtStreamSynchronize(rtStream_t stream) { return aclrtSynchronizeStream(stream); }
EXPORT rtError_t rtMalloc(void **p, uint64_t bytes, rtMemType_t, uint16_t) { return aclrtMalloc(p, bytes, ACL_MEM_MALLOC_HUGE_FIRST); }
EXPORT rtError_t rtFree(void *p) { return aclrtFree(p); }
EXPORT rtError_t rtMallocHost(void **p, uint64_t bytes, rtMemType_t) { return aclrtMallocHost(p, bytes); }
EXPORT rtError_t rtFreeHost(void *p) { return aclrtFreeHost(p); }
EXPORT rtError_t rtMemcpy(void *to, uint64_t room, const void *from, uint64_t bytes, rtMemcpyKind_t kind) {
  return aclrtMemcpy(to, room, from, bytes, (aclrtMemcpyKind)kind);
}
EXPORT rtError_t rtDeviceSetLimit(int32_t, rtLimitType_t, uint32_t) { return 0; }
EXPORT rtError_t rtGetC2cCtrlAddr(uint64_t *address, uint32_t *bytes) { *address = (uint64_t)flags, *bytes = sizeof flags; return 0; }

EXPORT rtError_t rtDevBinaryRegister(const rtDevBinary_t *binary, void **handle) {
  std::lock_guard hold(lock);
  if (!runner()) return failed(INTERNAL, "NPU_OFFLINE_CANN_RUNTIME names no runtime of npu_offline: %s", dlerror());
  // dlopen knows libraries by name, so that each needs its own; nobody else may write where it is.
  char folder[] = "/tmp/npu-offline-XXXXXX";
  if (!mkdtemp(folder)) return failed(INTERNAL, "no temporary folder");
  const char *data = (const char *)binary->data, *end = (const char *)memchr(data, '\n', binary->length);
  const std::string line(data, end ? end : data), name = std::string(folder) + "/kernel.so";
  const size_t bytes = end ? binary->length - line.size() - 1 : 0;
  FILE *file = fopen(name.c_str(), "wb");
  const bool written = file && bytes && fwrite(end + 1, 1, bytes, file) == bytes;
  if (file) fclose(file);
  void *library = written ? dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
  unlink(name.c_str());
  rmdir(folder);
  if (!library) return failed(INTERNAL, "this binary is not one of the stand-in compiler: %s", dlerror());
  auto *function = new Function{dlsym(library, "npu_offline_entry")};
  std::istringstream words(line);
  std::string why;
  words >> function->name >> function->arguments >> function->workspace >> function->locks;
  std::getline(words >> std::ws, why);
  if (!why.empty()) fprintf(stderr, "cann stand-in: %s runs from its Linalg IR: %s\n", function->name.c_str(), why.c_str());
  *handle = function;
  return 0;
}
EXPORT rtError_t rtFunctionRegister(void *binary, const void *stub, const char *, const void *name, uint32_t) {
  std::lock_guard hold(lock);
  const Function &function = *(Function *)binary;
  if (function.name != (const char *)name) return failed(INVALID, "the binary has kernel %s, not %s", function.name.c_str(), (const char *)name);
  functions[stub] = function;
  return 0;
}

// `arguments` is the packed struct of triton-ascend's launcher: the address for flags, the lock, the workspace, the kernel's
// own arguments, the grid. Letters: k the lock, w the workspace, p a pointer, a one that may reach any block of its device (its
// offsets are in memory), l and d eight bytes, others four, g the grid.
static rtError_t start(const void *stub, uint32_t blocks, void *arguments, uint32_t bytes, rtStream_t stream) {
  auto found = functions.find(stub);
  if (found == functions.end()) return failed(INVALID, "a launch of a kernel that was not registered");
  if (skipping) {
    launches++;
    trace("launch %s, %u programs", found->second.name.c_str(), blocks);
    return ACL_SUCCESS;
  }
  Launch launch{found->second, {}, {}, {0, 0, 0}};
  const char *name = launch.function.name.c_str();
  const int device = device_of_stream(stream);
  size_t at = 8;
  int number = 0, dimension = 0;
  for (char letter : launch.function.arguments) {
    const size_t size = strchr("kwpald", letter) ? 8 : 4;
    at = (at + size - 1) / size * size;
    if (at + size > bytes) return failed(INVALID, "%s: the launcher's %u bytes end before argument %d", name, bytes, number);
    const char *value = (const char *)arguments + at;
    at += size;
    if (size == 8 && strchr("kwpa", letter)) {
      char *pointer = *(char **)value;
      Block block{pointer, 0, device};
      if (pointer && !find_block(pointer, &block)) return failed(OUTSIDE, "%s: argument %d, %p, is not in a device's memory", name, number, pointer);
      if (block.device != device) return failed(OUTSIDE, "%s: argument %d is in the memory of device %d, the stream is of device %d", name, number, block.device, device);
      range reach{block.low, block.low + block.bytes};
      if (strchr("kw", letter)) {
        const size_t needed = letter == 'k' ? launch.function.locks * 8 : launch.function.workspace * blocks;
        if (needed && (!pointer || pointer + needed > reach.high))
          return failed(OUTSIDE, "%s: the %s needs %zu bytes and has %zu", name, letter == 'k' ? "lock" : "workspace", needed, pointer ? (size_t)(reach.high - pointer) : 0);
        reach = {pointer, pointer + needed};
      }
      if (letter == 'a') memory_in_use(device, &reach.low, &reach.high);
      for (int64_t slot : {(int64_t)pointer, (int64_t)pointer, (int64_t)0, (int64_t)(reach.high - reach.low), (int64_t)1}) launch.slots.push_back(slot);
      launch.ranges.push_back(reach);
    } else if (letter == 'g') {
      memcpy(&launch.grid[dimension++], value, 4);
    } else {
      int64_t slot = 0;
      memcpy(&slot, value, size);
      launch.slots.push_back(slot);
    }
    number++;
  }
  if ((at + 7) / 8 != (bytes + 7ul) / 8) return failed(INVALID, "%s: the launcher gave %u bytes, the kernel takes %zu", name, bytes, at);
  for (int32_t size : launch.grid) launch.slots.push_back(size);
  if ((int64_t)launch.grid[0] * launch.grid[1] * launch.grid[2] != blocks || blocks > 65535) return failed(INVALID, "%s: %u programs", name, blocks);
  launches++;
  trace("launch %s, %u programs", name, blocks);
  return enqueue(stream, "a kernel", [launch] { return run(launch); });
}
EXPORT rtError_t rtKernelLaunch(const void *stub, uint32_t blocks, void *arguments, uint32_t bytes, rtSmDesc_t *, rtStream_t stream) {
  std::lock_guard hold(lock);
  const rtError_t error = start(stub, blocks, arguments, bytes, stream);
  // torch_npu launches from a thread of its own: whoever waits for the stream hears of it, too.
  if (error) enqueue(stream, "a launch that was refused", [error] { return (aclError)error; });
  return error;
}
EXPORT rtError_t rtKernelLaunchWithFlagV2(const void *, uint32_t, rtArgsEx_t *, rtSmDesc_t *, rtStream_t, uint32_t, const rtTaskCfgInfo_t *) {
  return standin_missing(__func__);
}
