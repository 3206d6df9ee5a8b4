// Streams, events and graphs. Nothing that is put on a stream is done before somebody waits for it, and then only what that
// needs: a wait that is missing in a program under test shows as a wrong result. NPU_OFFLINE_CANN_STREAMS chooses:
//   late      (default) a stream works only when the host waits for it, or another stream that it waits for
//   eager     work is done when it is enqueued
//   SEED      a number: streams work in a random order, now and then before anybody waits
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "standin.h"

using namespace standin;

namespace {
struct Stream;
struct Graph;

struct Record {  // of an event on a stream
  Stream *stream = nullptr;
  Graph *graph = nullptr;
  bool done = false;
  uint64_t stamp = 0;
  aclError error = ACL_SUCCESS;  // why it will never be reached
};
struct Task {
  const char *what;
  Work work;
  std::shared_ptr<Record> awaits;  // another stream's, which comes first
  std::shared_ptr<Record> records = nullptr;
};
struct Graph {
  std::vector<Work> work;
  std::set<Stream *> streams;
  Stream *origin = nullptr;
};
struct Stream {
  int32_t id, device;
  std::deque<Task> queue;
  aclError error = ACL_SUCCESS;
  Graph *graph = nullptr;  // that it is captured into
};
struct Event {
  std::shared_ptr<Record> last;
};

std::set<Stream *> all;
int32_t streams_made = 0;
// Whether a device's streams stop at a failure, for good; otherwise the next wait hears of it, and work goes on. CANN keeps it
// for all streams of a context, whichever of them it was set for.
bool stops[16];
constexpr aclError CAPTURING = 107027;  // ACL_ERROR_STREAM_CAPTURED of newer headers

uint64_t now() { return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
bool is_eager() { static bool eager = !strcmp(setting("NPU_OFFLINE_CANN_STREAMS", "late"), "eager"); return eager; }
std::mt19937 *random_order() {
  static const char *given = setting("NPU_OFFLINE_CANN_STREAMS", "late");
  static std::mt19937 generator(atoi(given));
  return given[0] >= '0' && given[0] <= '9' ? &generator : nullptr;
}

Stream *default_stream(int device) {  // what a null stream stands for
  static Stream *made[16];
  if (device < 0) device = 0;
  if (!made[device]) all.insert(made[device] = new Stream{0, device});
  return made[device];
}
Stream *stream_of(aclrtStream given) { return given ? (Stream *)given : default_stream(current_device()); }

void step(Stream *stream);
aclError finish(const std::shared_ptr<Record> &record) {
  while (!record->done && !record->error && !record->stream->queue.empty()) step(record->stream);
  return record->error;
}
void fail(Stream *stream, aclError error) {
  if (!stream->error) stream->error = error;
  if (!stops[stream->device]) return;
  for (const Task &dropped : stream->queue)
    if (dropped.records) dropped.records->error = stream->error;
  stream->queue.clear();
}
// The next of a stream's tasks, and first what it waits for.
void step(Stream *stream) {
  if (stream->queue.empty()) return;
  if (auto awaited = stream->queue.front().awaits)
    if (aclError error = finish(awaited)) return fail(stream, error);
  Task task = std::move(stream->queue.front());
  stream->queue.pop_front();
  trace("stream %d does %s", stream->id, task.what);
  aclError error = task.work ? task.work() : ACL_SUCCESS;
  if (error) fail(stream, error);
}
void step_at_random() {
  std::vector<Stream *> busy;
  for (Stream *stream : all)
    if (!stream->queue.empty()) busy.push_back(stream);
  if (!busy.empty()) step(busy[(*random_order())() % busy.size()]);
}
aclError finish(Stream *stream) {
  while (!stream->queue.empty()) random_order() ? step_at_random() : step(stream);
  aclError error = stream->error;
  if (!stops[stream->device]) stream->error = ACL_SUCCESS;
  return error;
}
aclError enqueue(Stream *stream, Task task) {
  if (stream->graph) {
    if (task.work) stream->graph->work.push_back(std::move(task.work));
    return ACL_SUCCESS;
  }
  if (stops[stream->device] && stream->error) {
    if (task.records) task.records->error = stream->error;
    return failed(stream->error, "%s on stream %d, which a failure has stopped", task.what, stream->id);
  }
  stream->queue.push_back(std::move(task));
  if (is_eager()) {
    while (!stream->queue.empty()) step(stream);
  } else if (random_order()) {
    while ((*random_order())() % 3 == 0) step_at_random();
  }
  return is_eager() ? stream->error : ACL_SUCCESS;
}
aclError wait(aclrtStream given) {
  std::lock_guard hold(lock);
  Stream *stream = stream_of(given);
  if (stream->graph) return failed(CAPTURING, "stream %d is waited for while it is captured", stream->id);
  return finish(stream);
}
aclError create(aclrtStream *stream) {
  std::lock_guard hold(lock);
  if (current_device() < 0) return failed(ACL_ERROR_RT_CONTEXT_NULL, "a stream before aclrtSetDevice");
  Stream *made = new Stream{++streams_made, current_device()};
  all.insert(made);
  *stream = made;
  return ACL_SUCCESS;
}
aclError destroy(aclrtStream given) {
  std::lock_guard hold(lock);
  aclError error = finish((Stream *)given);
  all.erase((Stream *)given);
  delete (Stream *)given;
  return error;
}
aclError query(const std::shared_ptr<Record> &record, bool *done) {
  *done = !record || record->done;
  if (*done || record->error) return *done ? ACL_SUCCESS : record->error;
  if (record->stream) step(record->stream);  // who asks again and again gets there
  return ACL_SUCCESS;
}
}  // namespace

aclError standin::enqueue(aclrtStream given, const char *what, Work work) {
  std::lock_guard hold(lock);
  Stream *stream = stream_of(given);
  if (!all.count(stream)) return failed(ACL_ERROR_RT_PARAM_INVALID, "%s on a stream that does not exist", what);
  return ::enqueue(stream, {what, std::move(work), nullptr});
}
int standin::device_of_stream(aclrtStream given) { return stream_of(given)->device; }
void standin::finish_device(int device) {
  std::lock_guard hold(lock);
  for (Stream *stream : std::vector<Stream *>(all.begin(), all.end()))
    while (stream->device == device && !stream->queue.empty()) step(stream);
}
EXPORT void standin_enqueue(aclrtStream stream, const char *what, Work *work) { standin::enqueue(stream, what, *work); }

EXPORT aclError aclrtCreateStream(aclrtStream *s) { return create(s); }
EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream *s, uint32_t, uint32_t) { return create(s); }
EXPORT aclError aclrtDestroyStream(aclrtStream s) { return destroy(s); }
EXPORT aclError aclrtDestroyStreamForce(aclrtStream s) { return destroy(s); }
EXPORT aclError aclrtSynchronizeStream(aclrtStream s) { return wait(s); }
EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream s, int32_t) { return wait(s); }
EXPORT aclError aclrtSynchronizeDevice() {
  std::lock_guard hold(lock);
  aclError error = ACL_SUCCESS;
  for (Stream *stream : std::vector<Stream *>(all.begin(), all.end())) {
    if (stream->device != current_device()) continue;
    if (stream->graph) return failed(CAPTURING, "the device is waited for while stream %d is captured", stream->id);
    if (aclError one = finish(stream)) error = one;
  }
  return error;
}
EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }
EXPORT aclError aclrtStreamQuery(aclrtStream given, aclrtStreamStatus *status) {
  std::lock_guard hold(lock);
  Stream *stream = stream_of(given);
  *status = stream->queue.empty() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  step(stream);
  return ACL_SUCCESS;
}
EXPORT aclError aclrtSetStreamFailureMode(aclrtStream given, uint64_t mode) {
  std::lock_guard hold(lock);
  trace("stream %d %s", stream_of(given)->id, mode == ACL_STOP_ON_FAILURE ? "stops at a failure" : "goes on after failures");
  stops[stream_of(given)->device] = mode == ACL_STOP_ON_FAILURE;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtStreamGetId(aclrtStream s, int32_t *id) { *id = stream_of(s)->id; return ACL_SUCCESS; }
EXPORT aclError aclrtStreamWaitEvent(aclrtStream given, aclrtEvent event) {
  std::lock_guard hold(lock);
  Stream *stream = stream_of(given);
  auto record = ((Event *)event)->last;
  if (!record) return ACL_SUCCESS;
  if (record->graph && !stream->graph) {  // it joins the capture
    stream->graph = record->graph;
    record->graph->streams.insert(stream);
  }
  return stream->graph ? ACL_SUCCESS : ::enqueue(stream, {"the wait for an event", nullptr, record});
}

EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent *e, uint32_t) { *e = new Event; return ACL_SUCCESS; }
EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent *e, uint32_t) { *e = new Event; return ACL_SUCCESS; }
EXPORT aclError aclrtDestroyEvent(aclrtEvent e) { delete (Event *)e; return ACL_SUCCESS; }
EXPORT aclError aclrtRecordEvent(aclrtEvent event, aclrtStream given) {
  std::lock_guard hold(lock);
  Stream *stream = stream_of(given);
  auto record = std::make_shared<Record>();
  ((Event *)event)->last = record;
  if (stream->graph) {
    record->graph = stream->graph;
    record->done = true;
    return ACL_SUCCESS;
  }
  record->stream = stream;
  auto reached = [record] { record->done = true, record->stamp = now(); return ACL_SUCCESS; };
  return ::enqueue(stream, {"the record of an event", reached, nullptr, record});
}
EXPORT aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }
EXPORT aclError aclrtSynchronizeEvent(aclrtEvent event) {
  std::lock_guard hold(lock);
  if (auto record = ((Event *)event)->last) {
    if (record->graph) return failed(CAPTURING, "an event is waited for while its stream is captured");
    return finish(record);
  }
  return ACL_SUCCESS;
}
EXPORT aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
  std::lock_guard hold(lock);
  bool done;
  if (aclError error = query(((Event *)event)->last, &done)) return error;
  *status = done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
  std::lock_guard hold(lock);
  bool done;
  if (aclError error = query(((Event *)event)->last, &done)) return error;
  *status = done ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent first, aclrtEvent second) {
  std::lock_guard hold(lock);
  auto a = ((Event *)first)->last, b = ((Event *)second)->last;
  if (!a || !b || !a->done || !b->done) return failed(ACL_ERROR_RT_PARAM_INVALID, "the time between events that were not both reached");
  *milliseconds = (b->stamp - a->stamp) / 1e6f;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtLaunchCallback(aclrtCallback function, void *data, aclrtCallbackBlockType, aclrtStream stream) {
  return standin::enqueue(stream, "a callback", [=] { function(data); return ACL_SUCCESS; });
}
EXPORT aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *data) {
  return standin::enqueue(stream, "a host function", [=] { function(data); return ACL_SUCCESS; });
}

EXPORT aclError aclmdlRICaptureBegin(aclrtStream given, aclmdlRICaptureMode) {
  std::lock_guard hold(lock);
  Stream *stream = stream_of(given);
  if (stream->graph) return failed(CAPTURING, "stream %d is captured already", stream->id);
  stream->graph = new Graph;
  stream->graph->origin = stream;
  stream->graph->streams.insert(stream);
  return ACL_SUCCESS;
}
EXPORT aclError aclmdlRICaptureEnd(aclrtStream given, aclmdlRI *graph) {
  std::lock_guard hold(lock);
  Stream *stream = stream_of(given);
  if (!stream->graph || stream->graph->origin != stream) return failed(ACL_ERROR_RT_PARAM_INVALID, "no capture began on stream %d", stream->id);
  *graph = stream->graph;
  for (Stream *captured : ((Graph *)*graph)->streams) captured->graph = nullptr;
  return ACL_SUCCESS;
}
EXPORT aclError aclmdlRICaptureGetInfo(aclrtStream given, aclmdlRICaptureStatus *status, aclmdlRI *graph) {
  std::lock_guard hold(lock);
  Stream *stream = stream_of(given);
  *status = stream->graph ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (graph) *graph = stream->graph;
  return ACL_SUCCESS;
}
EXPORT aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) { *mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL; return ACL_SUCCESS; }
EXPORT aclError aclmdlRIExecuteAsync(aclmdlRI graph, aclrtStream stream) {
  auto work = ((Graph *)graph)->work;
  return standin::enqueue(stream, "a graph", [work] {
    for (const Work &one : work)
      if (aclError error = one()) return error;
    return ACL_SUCCESS;
  });
}
EXPORT aclError aclmdlRIDestroy(aclmdlRI graph) {
  std::lock_guard hold(lock);
  delete (Graph *)graph;
  return ACL_SUCCESS;
}
