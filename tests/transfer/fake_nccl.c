/* NCCL's functions as its manual describes those of a non-blocking communicator, between threads of one process.

   Tests turn the knobs, and read what was counted. A misuse is a call that NCCL forbids. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { DONE = 0, SYSTEM = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7, PAIRS = 4096 };

typedef struct { char internal[128]; } Id;
typedef struct { size_t size; unsigned magic, version; int blocking, cga; } Config;
typedef struct {
  int pair, rank, ready;
  void *stream, *bytes;
  size_t size;
  pthread_t owner;
} Comm;

int fake_hold_open, fake_hold_launch, fake_hold_device; /* these never get done */
int fake_fails;                                         /* communicators have failed by themselves */
int fake_tickets, fake_opened, fake_aborted, fake_misused;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Comm *ends[PAIRS][2];

static int state(Comm *comm) {
  if (fake_fails) return SYSTEM;
  comm->ready |= ends[comm->pair][0] && ends[comm->pair][1] && !fake_hold_open;
  if (!comm->ready) return IN_PROGRESS;
  return comm->bytes && fake_hold_launch ? IN_PROGRESS : DONE;
}

static int known(Comm *comm) {
  int good = comm && pthread_equal(comm->owner, pthread_self());
  fake_misused += !good;
  return good;
}

int ncclGetUniqueId(Id *id) {
  pthread_mutex_lock(&lock);
  int pair = fake_tickets++;
  memset(id, 0, sizeof *id);
  memcpy(id->internal + 1, &pair, sizeof pair); /* a zero comes first, as it may in NCCL's */
  pthread_mutex_unlock(&lock);
  return DONE;
}

int ncclCommInitRankConfig(Comm **made, int ranks, Id id, int rank, Config *config) {
  int pair;
  memcpy(&pair, id.internal + 1, sizeof pair);
  pthread_mutex_lock(&lock);
  int wrong = ranks != 2 || config->size != sizeof *config || config->magic != 0xcafebeef || config->version < 21400 ||
              config->blocking || pair < 0 || pair >= PAIRS || ends[pair][rank];
  if (!wrong) {
    Comm *comm = *made = ends[pair][rank] = calloc(1, sizeof *comm);
    comm->pair = pair;
    comm->rank = rank;
    comm->owner = pthread_self();
    ++fake_opened;
  }
  fake_misused += wrong;
  pthread_mutex_unlock(&lock);
  return wrong ? INVALID_ARGUMENT : IN_PROGRESS;
}

int ncclCommGetAsyncError(Comm *comm, int *result) {
  pthread_mutex_lock(&lock);
  int good = known(comm);
  if (good) *result = state(comm);
  pthread_mutex_unlock(&lock);
  return good ? DONE : INVALID_ARGUMENT;
}

static int transfer(void *bytes, size_t size, int type, int peer, Comm *comm, void *stream) {
  pthread_mutex_lock(&lock);
  int good = known(comm) && !fake_fails;
  if (good && (state(comm) != DONE || comm->bytes || type != 1 || peer != 1 - comm->rank)) good = 0, ++fake_misused;
  if (good) comm->bytes = bytes, comm->size = size, comm->stream = stream;
  pthread_mutex_unlock(&lock);
  return good ? IN_PROGRESS : fake_fails ? SYSTEM : INVALID_USAGE;
}

int ncclSend(void *bytes, size_t size, int type, int peer, Comm *comm, void *stream) {
  return transfer(bytes, size, type, peer, comm, stream);
}

int ncclRecv(void *bytes, size_t size, int type, int peer, Comm *comm, void *stream) {
  return transfer(bytes, size, type, peer, comm, stream);
}

int ncclCommAbort(Comm *comm) {
  pthread_mutex_lock(&lock);
  if (known(comm)) {
    ends[comm->pair][comm->rank] = NULL;
    free(comm);
    ++fake_aborted;
  }
  pthread_mutex_unlock(&lock);
  return DONE;
}

const char *ncclGetErrorString(int result) { return result == SYSTEM ? "unhandled system error" : "another error"; }

/* The device: whether a stream is still at work. */
int fake_busy(void *stream) {
  int busy = 0;
  pthread_mutex_lock(&lock);
  for (int pair = 0; pair < fake_tickets && pair < PAIRS; ++pair) {
    Comm *from = ends[pair][0], *to = ends[pair][1];
    if (from && to && from->bytes && to->bytes && !fake_hold_device && !fake_hold_launch) {
      memcpy(to->bytes, from->bytes, from->size);
      from->bytes = to->bytes = NULL;
    }
    for (int rank = 0; rank < 2; ++rank)
      busy |= ends[pair][rank] && ends[pair][rank]->stream == stream && ends[pair][rank]->bytes;
  }
  pthread_mutex_unlock(&lock);
  return busy;
}
