/* The Ascend runtime that the torch_npu wheel is linked with, on host memory: one library under the names of six.
 *
 * Memory of a device is host memory. It is counted for each device, and an allocation above the device's total fails
 * with the error of the real runtime, because vLLM and SGLang size their caches from the free memory. Every process
 * counts its own allocations: two processes on one device do not see each other's.
 * Work is done when it is asked for, so streams have nothing to wait for; events keep the time of their record.
 * To wait for what is no stream is an error.
 *
 *   EMU_NPUS        devices (default 1); ASCEND_RT_VISIBLE_DEVICES may name fewer
 *   EMU_NPU_BYTES   total memory of a device in bytes (default 2 GiB)
 *
 * Operators are not here: aclnn kernels are missing, and Python serves each call before it would look for one.
 * So Python (graphs.py) also records those of a graph, and is told here when to begin, to end and to run them again.
 * One graph is captured at a time in a process; task groups (aclmdlRICaptureTask*) are missing.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define OK 0
#define OUT_OF_MEMORY 207001   /* ACL_ERROR_RT_MEMORY_ALLOCATION */
#define INVALID_DEVICE 107001  /* ACL_ERROR_INVALID_DEVICE */
#define OPERATOR_MISSING 100024 /* ACL_ERROR_OP_NOT_FOUND */
#define CAPTURE_FAILED 500000   /* ACL_ERROR_INTERNAL_ERROR */
#define MOST_DEVICES 16
#define HEADER 512             /* bytes before a block; also its alignment */

typedef struct {
  size_t bytes;
  int device;
} Block;

typedef struct {
  struct timespec recorded;
} Event;

static size_t used[MOST_DEVICES];
static __thread int current_device;
static int contexts[MOST_DEVICES];
static char error_message[256] = "";

static size_t number(const char *name, size_t otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static int device_count(void) {
  size_t wanted = number("EMU_NPUS", 1);
  const char *visible = getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (visible) {
    size_t named = *visible ? 1 : 0;
    for (; *visible; visible++) named += *visible == ',';
    if (named < wanted) wanted = named;
  }
  return wanted > MOST_DEVICES ? MOST_DEVICES : (int)wanted;
}

static size_t device_bytes(void) { return number("EMU_NPU_BYTES", 2ull << 30); }

/* Library and devices. */
int aclInit(const char *config) { return OK; }
int aclFinalize(void) { return OK; }
const char *aclGetRecentErrMsg(void) { return error_message; }
const char *aclrtGetSocName(void) { return "Ascend910B1"; }
int aclrtGetDeviceCount(uint32_t *count) { return *count = device_count(), OK; }
int aclrtGetDevice(int *device) { return *device = current_device, OK; }
int aclrtResetDevice(int device) { return OK; }
int aclrtSetDevice(int device) {
  if (device < 0 || device >= device_count()) {
    snprintf(error_message, sizeof error_message, "emulated NPU: device %d of %d", device, device_count());
    return INVALID_DEVICE;
  }
  current_device = device;
  return OK;
}
int aclrtGetCurrentContext(void **context) { return *context = &contexts[current_device], OK; }
int aclrtSetCurrentContext(void *context) {
  current_device = (int)((int *)context - contexts);
  return OK;
}
int aclGetDeviceCapability(uint32_t device, int kind, int64_t *value) { return *value = 20, OK; }
int aclrtGetDeviceInfo(uint32_t device, int kind, int64_t *value) { return *value = 20, OK; }
int aclrtDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 0, OK; }

/* Memory. */
int aclrtMalloc(void **pointer, size_t bytes, int policy) {
  size_t total = device_bytes();
  size_t after = __atomic_add_fetch(&used[current_device], bytes, __ATOMIC_SEQ_CST);
  char *start = NULL;
  if (after > total || posix_memalign((void **)&start, HEADER, bytes + HEADER)) {
    __atomic_sub_fetch(&used[current_device], bytes, __ATOMIC_SEQ_CST);
    snprintf(error_message, sizeof error_message, "emulated NPU %d: %zu bytes asked for, %zu of %zu in use",
             current_device, bytes, used[current_device], total);
    return OUT_OF_MEMORY;
  }
  *(Block *)start = (Block){bytes, current_device};
  *pointer = start + HEADER;
  return OK;
}
int aclrtMallocAlign32(void **pointer, size_t bytes, int policy) { return aclrtMalloc(pointer, bytes, policy); }
int aclrtFree(void *pointer) {
  if (!pointer) return OK;
  Block *block = (Block *)((char *)pointer - HEADER);
  __atomic_sub_fetch(&used[block->device], block->bytes, __ATOMIC_SEQ_CST);
  free(block);
  return OK;
}
int aclrtMallocHost(void **pointer, size_t bytes) { return posix_memalign(pointer, HEADER, bytes ? bytes : 1) ? OUT_OF_MEMORY : OK; }
int aclrtFreeHost(void *pointer) { return free(pointer), OK; }
int aclrtGetMemInfo(int kind, size_t *available, size_t *total) {
  *total = device_bytes();
  *available = *total - used[current_device];
  return OK;
}
int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind) { return memmove(to, from, bytes), OK; }
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int kind, void *stream) { return memmove(to, from, bytes), OK; }
int aclrtMemset(void *to, size_t room, int32_t value, size_t bytes) { return memset(to, value, bytes), OK; }
int aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t bytes, void *stream) { return memset(to, value, bytes), OK; }

/* Streams and events. */
#define NO_STREAM 107003       /* ACL_ERROR_RT_STREAM_CONTEXT */
#define MOST_STREAMS 4096
static void *streams[MOST_STREAMS];

static int replace_stream(void *before, void *after) {
  for (int i = 0; i < MOST_STREAMS; i++) {
    void *expected = before;
    if (__atomic_compare_exchange_n(&streams[i], &expected, after, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return OK;
  }
  snprintf(error_message, sizeof error_message, "emulated NPU: %p is no stream", before);
  return NO_STREAM;
}
int aclrtCreateStream(void **stream) { return *stream = calloc(1, 64), replace_stream(NULL, *stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) { return aclrtCreateStream(stream); }
int aclrtDestroyStream(void *stream) { return replace_stream(stream, NULL) ? NO_STREAM : (free(stream), OK); }
int aclrtDestroyStreamForce(void *stream) { return aclrtDestroyStream(stream); }
int aclrtSynchronizeStream(void *stream) { return stream ? replace_stream(stream, stream) : OK; }
int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t milliseconds) { return aclrtSynchronizeStream(stream); }
int aclrtSynchronizeDevice(void) { return OK; }
int aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) { return OK; }
int aclrtStreamQuery(void *stream, int *status) { return *status = 0, OK; }
int aclrtStreamWaitEvent(void *stream, void *event) { return OK; }
int aclrtGetStreamAvailableNum(uint32_t *count) { return *count = 1024, OK; }
int aclrtSetStreamFailureMode(void *stream, uint64_t mode) { return OK; }
int aclrtCreateEvent(void **event) { return *event = calloc(1, sizeof(Event)), OK; }
int aclrtCreateEventWithFlag(void **event, uint32_t flags) { return aclrtCreateEvent(event); }
int aclrtCreateEventExWithFlag(void **event, uint32_t flags) { return aclrtCreateEvent(event); }
int aclrtDestroyEvent(void *event) { return free(event), OK; }
int aclrtRecordEvent(void *event, void *stream) { return clock_gettime(CLOCK_MONOTONIC, &((Event *)event)->recorded), OK; }
int aclrtResetEvent(void *event, void *stream) { return OK; }
int aclrtSynchronizeEvent(void *event) { return OK; }
int aclrtSynchronizeEventWithTimeout(void *event, int32_t milliseconds) { return OK; }
int aclrtQueryEventStatus(void *event, int *status) { return *status = 1, OK; }
int aclrtQueryEventWaitStatus(void *event, int *status) { return *status = 1, OK; }
int aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
  struct timespec from = ((Event *)start)->recorded, to = ((Event *)end)->recorded;
  *milliseconds = (to.tv_sec - from.tv_sec) * 1e3f + (to.tv_nsec - from.tv_nsec) / 1e6f;
  return OK;
}

/* Graphs. */
enum { CAPTURE_BEGINS, CAPTURE_ENDS, REPLAY, DESTROY };
typedef struct {
  int number;
} Graph;
static int (*tell_graphs)(int event, int graph);
static Graph *captured;
static void *captured_stream;
static int graphs_so_far;

static int tell(int event, Graph *graph) {
  if (tell_graphs(event, graph->number) == 0) return OK;
  snprintf(error_message, sizeof error_message, "emulated NPU: a graph failed; standard error has the traceback");
  return CAPTURE_FAILED;
}

void emulated_tell_graphs(int (*told)(int event, int graph)) { tell_graphs = told; }
int aclmdlRICaptureBegin(void *stream, int mode) {
  if (captured || !tell_graphs) {
    snprintf(error_message, sizeof error_message, "emulated NPU: %s", captured ? "a capture is under way" : "nobody records graphs");
    return CAPTURE_FAILED;
  }
  captured = calloc(1, sizeof(Graph));
  captured->number = ++graphs_so_far;
  captured_stream = stream;
  return tell(CAPTURE_BEGINS, captured);
}
int aclmdlRICaptureEnd(void *stream, void **graph) {
  if (!captured || stream != captured_stream) {
    snprintf(error_message, sizeof error_message, "emulated NPU: this stream captures no graph");
    return CAPTURE_FAILED;
  }
  Graph *ended = captured;
  *graph = ended;
  captured = NULL;
  return tell(CAPTURE_ENDS, ended);
}
int aclmdlRICaptureGetInfo(void *stream, int *status, void **graph) {
  *status = captured && stream == captured_stream; /* ACL_MODEL_RI_CAPTURE_STATUS_NONE, _ACTIVE */
  *graph = *status ? captured : NULL;
  return OK;
}
int aclmdlRICaptureThreadExchangeMode(int *mode) { return OK; }
int aclmdlRIExecuteAsync(void *graph, void *stream) { return tell(REPLAY, graph); }
int aclmdlRIDestroy(void *graph) {
  int failed = tell(DESTROY, graph);
  free(graph);
  return failed;
}

/* Settings that change nothing here. */
int aclrtSetOpWaitTimeout(uint32_t seconds) { return OK; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { return OK; }
int aclrtSetDeviceSatMode(int mode) { return OK; }
int aclSetCompileopt(int option, const char *value) { return OK; }
int aclrtGetSysParamOpt(int option, int64_t *value) { return *value = 0, OK; }
int aclrtSetSysParamOpt(int option, int64_t value) { return OK; }
int aclrtCtxGetSysParamOpt(int option, int64_t *value) { return *value = 0, OK; }
int aclrtCtxSetSysParamOpt(int option, int64_t value) { return OK; }

/* An operator that nobody emulates: an error, because success would leave its result unwritten. */
int aclopCompileAndExecute(const char *operator) {
  snprintf(error_message, sizeof error_message, "emulated NPU: operator %s has no kernel", operator);
  return OPERATOR_MISSING;
}

/* The wheel needs these symbols to be loaded; a call would return success and do nothing. */
#define LINKED(name) \
  long name(void) { return OK; }
LINKED(MsprofGetHashId) LINKED(MsprofRegisterCallback) LINKED(MsprofReportAdditionalInfo) LINKED(MsprofReportApi)
LINKED(MsprofReportCompactInfo) LINKED(MsprofSysCycleTime) LINKED(aclAppLog) LINKED(aclCreateDataBuffer)
LINKED(aclCreateTensorDesc) LINKED(aclDestroyDataBuffer) LINKED(aclDestroyTensorDesc) LINKED(aclGetTensorDescDimV2)
LINKED(aclGetTensorDescFormat) LINKED(aclGetTensorDescNumDims) LINKED(aclGetTensorDescType) LINKED(aclSetTensorDescName)
LINKED(aclSetTensorFormat) LINKED(aclSetTensorPlaceMent) LINKED(aclSetTensorShape) LINKED(aclmdlFinalizeDump)
LINKED(aclmdlInitDump) LINKED(aclmdlSetDump) LINKED(aclopCreateAttr)
LINKED(aclopDestroyAttr) LINKED(aclopSetAttrBool) LINKED(aclopSetAttrDataType) LINKED(aclopSetAttrFloat)
LINKED(aclopSetAttrInt) LINKED(aclopSetAttrListBool) LINKED(aclopSetAttrListFloat) LINKED(aclopSetAttrListInt)
LINKED(aclopSetAttrListListInt) LINKED(aclopSetAttrString) LINKED(aclrtBinaryGetFunction) LINKED(aclrtBinaryLoadFromData)
LINKED(aclrtDeviceEnablePeerAccess) LINKED(aclrtDeviceGetBareTgid) LINKED(aclrtFreePhysical) LINKED(aclrtGetFunctionAddr)
LINKED(aclrtMallocPhysical) LINKED(aclrtMapMem) LINKED(aclrtMemExportToShareableHandle)
LINKED(aclrtMemImportFromShareableHandle) LINKED(aclrtMemSetPidToShareableHandle) LINKED(aclrtProcessReport)
LINKED(aclrtReleaseMemAddress) LINKED(aclrtReserveMemAddress) LINKED(aclrtUnmapMem) LINKED(rtDevBinaryRegister)
LINKED(rtFunctionRegister) LINKED(rtGetC2cCtrlAddr) LINKED(rtKernelLaunch)
