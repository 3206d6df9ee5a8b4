// The profiler, which triton-ascend's launchers report to while it is on: how many tensors each launch had is kept.
#include <chrono>
#include <cstring>
#include <vector>

#include "profiling/aprof_pub.h"
#include "standin.h"

using namespace standin;

namespace {
constexpr uint64_t LAUNCHES = 0x800, SHAPES = 0x2;  // of profSwitch
constexpr uint32_t START_OR_STOP = 1, START = 1;
std::vector<ProfCommandHandle> listeners;
std::vector<uint32_t> tensors;  // of each launch that told of them
}  // namespace

EXPORT int32_t MsprofRegisterCallback(uint32_t, ProfCommandHandle listener) {
  std::lock_guard hold(lock);
  listeners.push_back(listener);
  return 0;
}
EXPORT uint64_t MsprofGetHashId(const char *, size_t) { return 1; }
EXPORT uint64_t MsprofSysCycleTime() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
EXPORT int32_t MsprofReportApi(uint32_t, const MsprofApi *) { return 0; }
EXPORT int32_t MsprofReportCompactInfo(uint32_t, const VOID_PTR, uint32_t) { return 0; }
EXPORT int32_t MsprofReportAdditionalInfo(uint32_t, const VOID_PTR data, uint32_t) {
  std::lock_guard hold(lock);
  const auto *info = (const MsprofAdditionalInfo *)data;
  if (info->type == MSPROF_REPORT_NODE_TENSOR_INFO_TYPE) tensors.push_back(((const MsprofTensorInfo *)info->data)->tensorNum);
  return 0;
}

// Profiling begins, with the shapes of tensors or without, or ends (< 0).
EXPORT void standin_profile(int shapes) {
  std::lock_guard hold(lock);
  MsprofCommandHandle command;
  memset(&command, 0, sizeof command);
  command.type = START;
  command.profSwitch = shapes < 0 ? 0 : LAUNCHES | (shapes ? SHAPES : 0);
  if (shapes >= 0) tensors.clear();
  for (ProfCommandHandle listener : listeners) listener(START_OR_STOP, &command, sizeof command);
}
EXPORT int standin_tensors_told(uint32_t launch) { return launch < tensors.size() ? (int)tensors[launch] : -1; }
