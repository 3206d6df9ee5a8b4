// Declarations, no more than triton-ascend's driver and its generated launchers use of CANN's runtime; torch_npu's wheel has the
// other headers that they include.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "profiling/aprof_pub.h"

enum { MSPROF_GE_TASK_TYPE_AIV = 2, MSPROF_GE_TASK_TYPE_MIX_AIC = 4, MSPROF_GE_TASK_TYPE_MIX_AIV = 5 };  // not in torch_npu's copy

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t rtError_t;
typedef void *rtStream_t;
typedef uint32_t rtMemType_t;
typedef struct tagRtSmData rtSmDesc_t;

#define RT_ERROR_NONE 0
#define RT_MEMORY_HBM 0x2u
#define RT_MEMORY_HOST 0x81u
#define RT_DEV_BINARY_MAGIC_ELF 0x43554245U
#define RT_DEV_BINARY_MAGIC_ELF_AICUBE 0x41494343U
#define RT_DEV_BINARY_MAGIC_ELF_AIVEC 0x41415246U

typedef enum tagRtMemcpyKind {
  RT_MEMCPY_HOST_TO_HOST,
  RT_MEMCPY_HOST_TO_DEVICE,
  RT_MEMCPY_DEVICE_TO_HOST,
  RT_MEMCPY_DEVICE_TO_DEVICE
} rtMemcpyKind_t;

typedef enum {
  RT_LIMIT_TYPE_LOW_POWER_TIMEOUT = 0,
  RT_LIMIT_TYPE_SIMT_WARP_STACK_SIZE = 1,
  RT_LIMIT_TYPE_SIMT_DVG_WARP_STACK_SIZE = 2,
  RT_LIMIT_TYPE_STACK_SIZE = 3
} rtLimitType_t;

typedef struct {
  uint32_t magic, version;
  const void *data;
  uint64_t length;
} rtDevBinary_t;

typedef struct {
  void *args, *hostInputInfoPtr;
  uint32_t argsSize, tilingAddrOffset, tilingDataOffset;
  uint16_t hostInputInfoNum;
  uint8_t hasTiling, isNoNeedH2DCopy, reserved[4];
} rtArgsEx_t;

typedef struct {
  uint8_t qos, partId, schemMode;
  bool d2dCrossFlag;
  uint32_t blockDimOffset;
  uint8_t dumpflag, neverTimeout, rev[2];
  uint32_t localMemorySize;
} rtTaskCfgInfo_t;

rtError_t rtSetDevice(int32_t device);
rtError_t rtGetSocVersion(char *version, uint32_t length);
rtError_t rtGetAiCoreCount(uint32_t *count);
rtError_t rtStreamCreate(rtStream_t *stream, int32_t priority);
rtError_t rtStreamDestroy(rtStream_t stream);
rtError_t rtStreamSynchronize(rtStream_t stream);
rtError_t rtMalloc(void **p, uint64_t bytes, rtMemType_t type, uint16_t module);
rtError_t rtFree(void *p);
rtError_t rtMallocHost(void **p, uint64_t bytes, rtMemType_t type);
rtError_t rtFreeHost(void *p);
rtError_t rtMemcpy(void *to, uint64_t room, const void *from, uint64_t bytes, rtMemcpyKind_t kind);
rtError_t rtDeviceSetLimit(int32_t device, rtLimitType_t type, uint32_t value);
rtError_t rtGetC2cCtrlAddr(uint64_t *address, uint32_t *bytes);
rtError_t rtDevBinaryRegister(const rtDevBinary_t *binary, void **handle);
rtError_t rtFunctionRegister(void *handle, const void *stub, const char *stub_name, const void *name, uint32_t mode);
rtError_t rtKernelLaunch(const void *stub, uint32_t blocks, void *args, uint32_t bytes, rtSmDesc_t *, rtStream_t stream);
rtError_t rtKernelLaunchWithFlagV2(const void *stub, uint32_t blocks, rtArgsEx_t *args, rtSmDesc_t *, rtStream_t stream,
                                   uint32_t flags, const rtTaskCfgInfo_t *config);
#ifdef __cplusplus
}
#endif
