// Device and host memory. Device memory is host memory, in an address range of its own for each device, so that a pointer tells
// whose it is. A page that may not be touched follows each block, what is freed may not be touched either, and what is
// allocated is full of NaN.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "standin.h"

using namespace standin;

namespace {
constexpr size_t PAGE = 4096, RESERVED = 1ull << 38;  // of addresses, a device
constexpr int MOST = 16;

struct Arena {
  char *low = nullptr, *next = nullptr;
  size_t used = 0;
  std::map<char *, size_t> blocks;
} arenas[MOST];
std::map<char *, size_t> host_blocks;

size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }
size_t capacity() { return strtoull(setting("NPU_OFFLINE_CANN_MEMORY", "34359738368"), nullptr, 10); }

aclError allocate(void **out, size_t bytes) {
  std::lock_guard hold(lock);
  int device = current_device();
  if (device < 0) return failed(ACL_ERROR_RT_CONTEXT_NULL, "aclrtMalloc before aclrtSetDevice");
  Arena &arena = arenas[device];
  if (!arena.low) {
    void *range = mmap(nullptr, RESERVED, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return failed(ACL_ERROR_RT_MEMORY_ALLOCATION, "this host gives no address space");
    arena.low = arena.next = (char *)range;
  }
  if (arena.used + bytes > capacity()) return failed(ACL_ERROR_RT_MEMORY_ALLOCATION, "the memory of device %d is full", device);
  char *block = arena.next;
  if (block + pages(bytes) + PAGE > arena.low + RESERVED) return failed(ACL_ERROR_RT_MEMORY_ALLOCATION, "no addresses are left");
  if (bytes && mprotect(block, pages(bytes), PROT_READ | PROT_WRITE)) return failed(ACL_ERROR_RT_MEMORY_ALLOCATION, "mprotect");
  memset(block, 0xff, bytes);
  arena.next += pages(bytes) + PAGE;
  arena.blocks[block] = bytes;
  arena.used += bytes;
  *out = block;
  return ACL_SUCCESS;
}

// The copy itself, once it is due: whose memory both sides are has to be what the caller said.
aclError copy(const char *who, void *to, size_t room, const void *from, size_t bytes, aclrtMemcpyKind kind, int device) {
  if (bytes > room) return failed(ACL_ERROR_RT_PARAM_INVALID, "%s: %zu bytes into %zu", who, bytes, room);
  bool to_device = kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  bool from_device = kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  int target = device_of(to), source = device_of(from);
  if (bytes && kind <= ACL_MEMCPY_DEVICE_TO_DEVICE && ((target >= 0) != to_device || (source >= 0) != from_device))
    return failed(ACL_ERROR_RT_PARAM_INVALID, "%s: kind %d, but to device %d from device %d (-1: the host)", who, kind, target, source);
  if (bytes && device >= 0 && target != device && source != device)
    return failed(ACL_ERROR_RT_PARAM_INVALID, "%s: to device %d from device %d on a stream of device %d", who, target, source, device);
  memmove(to, from, bytes);
  return ACL_SUCCESS;
}
}  // namespace

int standin::device_of(const void *address) {
  for (int i = 0; i < MOST; i++)
    if (arenas[i].low && address >= arenas[i].low && address < arenas[i].low + RESERVED) return i;
  return -1;
}

bool standin::find_block(const void *address, Block *found) {
  std::lock_guard hold(lock);
  int device = device_of(address);
  if (device < 0) return false;
  auto after = arenas[device].blocks.upper_bound((char *)address);
  if (after == arenas[device].blocks.begin()) return false;
  --after;
  *found = {after->first, after->second, device};
  return (char *)address <= after->first + after->second;
}

void standin::memory_in_use(int device, char **low, char **high) { *low = arenas[device].low, *high = arenas[device].next; }

EXPORT aclError aclrtMalloc(void **p, size_t bytes, aclrtMemMallocPolicy) { return allocate(p, bytes); }
EXPORT aclError aclrtMallocAlign32(void **p, size_t bytes, aclrtMemMallocPolicy) { return allocate(p, bytes); }

EXPORT aclError aclrtFree(void *p) {
  std::lock_guard hold(lock);
  int device = device_of(p);
  auto *blocks = device < 0 ? nullptr : &arenas[device].blocks;
  auto found = blocks ? blocks->find((char *)p) : std::map<char *, size_t>::iterator{};
  if (!blocks || found == blocks->end()) return failed(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree of %p, which was not allocated", p);
  finish_device(device);
  if (found->second) madvise(p, pages(found->second), MADV_DONTNEED), mprotect(p, pages(found->second), PROT_NONE);
  arenas[device].used -= found->second;
  blocks->erase(found);
  return ACL_SUCCESS;
}

// A late copy from or to host memory that was freed in between faults, as pages that are gone do.
EXPORT aclError aclrtMallocHost(void **p, size_t bytes) {
  std::lock_guard hold(lock);
  void *block = mmap(nullptr, pages(bytes) + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (block == MAP_FAILED) return failed(ACL_ERROR_RT_MEMORY_ALLOCATION, "no host memory");
  host_blocks[(char *)block] = pages(bytes) + PAGE;
  *p = block;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtFreeHost(void *p) {
  std::lock_guard hold(lock);
  auto found = host_blocks.find((char *)p);
  if (found == host_blocks.end()) return failed(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreeHost of %p, which was not allocated", p);
  munmap(p, found->second);
  host_blocks.erase(found);
  return ACL_SUCCESS;
}

EXPORT aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, aclrtMemcpyKind kind) {
  std::lock_guard hold(lock);  // at once, whatever is queued: as CANN's, it is in the order of no stream
  return copy(__func__, to, room, from, bytes, kind, -1);
}
EXPORT aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, aclrtMemcpyKind kind, aclrtStream stream) {
  int device = device_of_stream(stream);
  return enqueue(stream, "copy", [=] { return copy("aclrtMemcpyAsync", to, room, from, bytes, kind, device); });
}
static aclError fill(void *p, size_t room, int32_t value, size_t bytes) {
  if (bytes > room || device_of(p) < 0) return failed(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemset of %zu bytes in %zu at %p", bytes, room, p);
  memset(p, value, bytes);
  return ACL_SUCCESS;
}
EXPORT aclError aclrtMemset(void *p, size_t room, int32_t value, size_t bytes) {
  std::lock_guard hold(lock);
  return fill(p, room, value, bytes);
}
EXPORT aclError aclrtMemsetAsync(void *p, size_t room, int32_t value, size_t bytes, aclrtStream stream) {
  return enqueue(stream, "fill", [=] { return fill(p, room, value, bytes); });
}
EXPORT aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free, size_t *total) {
  std::lock_guard hold(lock);
  *total = capacity();
  *free = *total - (current_device() < 0 ? 0 : arenas[current_device()].used);
  return ACL_SUCCESS;
}
EXPORT aclError aclrtPointerGetAttributes(const void *p, aclrtPtrAttributes *attributes) {
  memset(attributes, 0, sizeof *attributes);
  int device = device_of(p);
  std::lock_guard hold(lock);
  auto after = host_blocks.upper_bound((char *)p);
  bool pinned = after != host_blocks.begin() && (char *)p < std::prev(after)->first + std::prev(after)->second;
  attributes->location.type = device >= 0 ? ACL_MEM_LOCATION_TYPE_DEVICE : pinned ? ACL_MEM_LOCATION_TYPE_HOST : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  attributes->location.id = device < 0 ? 0 : device;
  return ACL_SUCCESS;
}
