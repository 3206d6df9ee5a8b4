// Devices, contexts, settings and messages: what the host asks before and beside its work.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "acl/acl_op_compiler.h"
#include "standin.h"

using namespace standin;

std::recursive_mutex standin::lock;

namespace {
struct Context { int32_t device; } contexts[16];
thread_local int32_t current = -1;
thread_local std::string message;
std::atomic<int64_t> operators{0};
int64_t number(const char *name, const char *otherwise) { return atoll(setting(name, otherwise)); }
// npu_offline.cann writes the chip's table entry into the environment.
int64_t cube_cores() { return number("NPU_OFFLINE_CANN_CUBE_CORES", "20"); }
int64_t vector_cores() { return number("NPU_OFFLINE_CANN_VECTOR_CORES", "40"); }
int64_t l2_bytes() { return number("NPU_OFFLINE_CANN_L2_BYTES", "100663296"); }
const char *version() { return setting("NPU_OFFLINE_CANN_VERSION", "8.5.0"); }
}  // namespace

const char *standin::setting(const char *name, const char *otherwise) {
  const char *found = getenv(name);
  return found && *found ? found : otherwise;
}
bool standin::tracing() { static bool on = *setting("NPU_OFFLINE_CANN_TRACE", ""); return on; }
void standin::trace(const char *format, ...) {
  if (!tracing()) return;
  va_list list;
  va_start(list, format);
  fprintf(stderr, "cann stand-in: ");
  vfprintf(stderr, format, list);
  fprintf(stderr, "\n");
  va_end(list);
}
aclError standin::failed(aclError code, const char *format, ...) {
  char text[512];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  message = text;
  fprintf(stderr, "cann stand-in: error %d: %s\n", code, text);
  return code;
}
EXPORT int standin_missing(const char *name) { return failed(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "%s has no stand-in", name); }
EXPORT int standin_ignored(const char *name) { trace("%s", name); return 0; }
EXPORT void standin_count_operator() { operators++; }
EXPORT int64_t standin_operators() { return operators; }

int standin::devices() { return (int)number("NPU_OFFLINE_CANN_DEVICES", "2"); }
int standin::current_device() { return current; }

EXPORT aclError aclInit(const char *) { return ACL_SUCCESS; }
EXPORT aclError aclFinalize() { return ACL_SUCCESS; }
EXPORT aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= devices()) return failed(ACL_ERROR_RT_INVALID_DEVICEID, "device %d of %d", device, devices());
  current = device;
  contexts[device].device = device;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtResetDevice(int32_t device) { finish_device(device); return ACL_SUCCESS; }
EXPORT aclError aclrtGetDevice(int32_t *device) {
  if (current < 0) return ACL_ERROR_RT_CONTEXT_NULL;  // a question, which torch_npu asks before it sets one
  *device = current;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtGetDeviceCount(uint32_t *count) { *count = devices(); return ACL_SUCCESS; }
EXPORT const char *aclrtGetSocName() { return setting("NPU_OFFLINE_CANN_SOC", "Ascend910B4"); }
EXPORT aclError aclrtGetCurrentContext(aclrtContext *context) {
  if (current < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = &contexts[current];
  return ACL_SUCCESS;
}
EXPORT aclError aclrtSetCurrentContext(aclrtContext context) {
  if (!context) return ACL_ERROR_RT_CONTEXT_NULL;
  current = ((Context *)context)->device;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtGetRunMode(aclrtRunMode *mode) { *mode = ACL_HOST; return ACL_SUCCESS; }
EXPORT aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t, int32_t) { *can = 1; return ACL_SUCCESS; }
EXPORT aclError aclrtDeviceGetBareTgid(int32_t *pid) { *pid = getpid(); return ACL_SUCCESS; }
EXPORT aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
  *flags = 0;
  *active = contexts[device].device == device && current >= 0;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logic) { *logic = user; return ACL_SUCCESS; }
EXPORT aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr what, int64_t *value) {
  switch (what) {
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = cube_cores(); break;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = vector_cores(); break;
    case ACL_DEV_ATTR_AICPU_CORE_NUM: *value = 6; break;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: { size_t free, total; aclrtGetMemInfo(ACL_HBM_MEM, &free, &total); *value = total; break; }
    case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = l2_bytes(); break;
    default: return failed(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "the stand-in knows no device attribute %d", (int)what);
  }
  return ACL_SUCCESS;
}
EXPORT aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo what, int64_t *value) {
  switch (what) {
    case ACL_DEVICE_INFO_AI_CORE_NUM: *value = cube_cores(); break;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = vector_cores(); break;
    case ACL_DEVICE_INFO_L2_SIZE: *value = l2_bytes(); break;
    default: return failed(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "the stand-in knows no capability %d", (int)what);
  }
  return ACL_SUCCESS;
}

EXPORT const char *aclGetRecentErrMsg() {
  static thread_local std::string said;
  said.swap(message);
  message.clear();
  return said.empty() ? nullptr : said.c_str();
}
EXPORT aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
EXPORT aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
EXPORT void aclAppLog(aclLogLevel, const char *, const char *, uint32_t, const char *, ...) {}
EXPORT aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion *found) {
  int major = 0, minor = 0, release = 0;
  memset(found, 0, sizeof *found);
  sscanf(version(), "%d.%d.%d", &major, &minor, &release);
  snprintf(found->version, sizeof found->version, "%s", version());
  snprintf(found->majorVersion, sizeof found->majorVersion, "%d", major);
  snprintf(found->minorVersion, sizeof found->minorVersion, "%d", minor);
  snprintf(found->releaseVersion, sizeof found->releaseVersion, "%d", release);
  return ACL_SUCCESS;
}
EXPORT aclError aclsysGetVersionStr(char *, char *out) { strcpy(out, version()); return ACL_SUCCESS; }

// Settings that change nothing here.
EXPORT aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue *) { return ACL_SUCCESS; }
EXPORT aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
EXPORT aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t *flag) { *flag = 0; return ACL_SUCCESS; }
EXPORT aclError aclrtProcessReport(int32_t) { usleep(1000); return ACL_SUCCESS; }
EXPORT aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
EXPORT aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
EXPORT aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
EXPORT aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
EXPORT aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t *value) { *value = 0; return ACL_SUCCESS; }
EXPORT aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
EXPORT aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
EXPORT aclError aclrtSetOpExecuteTimeOutV2(uint64_t time, uint64_t *actual) { *actual = time; return ACL_SUCCESS; }
EXPORT aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
EXPORT aclError aclSetCompileopt(aclCompileOpt, const char *) { return ACL_SUCCESS; }
EXPORT size_t aclGetCompileoptSize(aclCompileOpt) { return 8; }
EXPORT aclError aclGetCompileopt(aclCompileOpt, char *value, size_t) {
  strcpy(value, "disable");  // of compilation at run time: otherwise torch_npu takes operators of the old interface
  return ACL_SUCCESS;
}
EXPORT aclError aclmdlInitDump() { return ACL_SUCCESS; }
EXPORT aclError aclmdlFinalizeDump() { return ACL_SUCCESS; }
EXPORT aclError aclGetCannAttribute(aclCannAttr, int32_t *value) { *value = 1; return ACL_SUCCESS; }
EXPORT aclError aclGetCannAttributeList(const aclCannAttr **list, size_t *count) { *list = nullptr; *count = 0; return ACL_SUCCESS; }
