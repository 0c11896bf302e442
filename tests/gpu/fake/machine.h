/* A GPU without one, for plugin.c: memory that the processor cannot touch, streams that take their time, graphs of steps. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef uint64_t Pointer;
/* CUresult */
enum { OK, INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT = 201, NOT_FOUND = 500, NOT_READY = 600, NOT_SUPPORTED = 801, IN_CAPTURE = 900 };

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

static long copies, kernels, waits, graphs;

static void trace(const char *name) {
    if (number("FAKE_CUDA_TRACE", 0))
        fprintf(stderr, "[%d] %s\n", getpid(), name);
}
#define API(name, ...) int name(__VA_ARGS__) { trace(#name);
#define END return OK; }

/* ---- Memory */

typedef struct Block { struct Block *next; char *at, *host; size_t bytes; int pinned; } Block;
static Block *blocks;
static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;

static Block *block_of(const void *address) {
    pthread_mutex_lock(&blocks_lock);
    Block *block = blocks;
    while (block && !((char *)address >= block->at && (char *)address < block->at + block->bytes))
        block = block->next;
    pthread_mutex_unlock(&blocks_lock);
    return block;
}

/* Where the processor can touch what is at this address. */
void *fake_host(const void *address) {
    Block *block = block_of(address);
    return block ? block->host + ((char *)address - block->at) : (void *)address;
}

static void *add_block(size_t bytes, int pinned) {
    Block *block = calloc(1, sizeof *block);
    size_t size = (bytes + 4095) & ~(size_t)4095;
    if (size == 0)
        size = 4096;
    if (pinned) {
        block->at = block->host = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    } else {
        int file = memfd_create("gpu", 0);
        if (ftruncate(file, (off_t)size))
            return NULL;
        block->host = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        block->at = mmap(NULL, size, number("FAKE_CUDA_REACHED", 0) ? PROT_READ | PROT_WRITE : PROT_NONE, MAP_SHARED, file, 0);
        close(file);
    }
    if (block->at == MAP_FAILED || block->host == MAP_FAILED)
        return NULL;
    block->bytes = size;
    block->pinned = pinned;
    pthread_mutex_lock(&blocks_lock);
    block->next = blocks;
    blocks = block;
    pthread_mutex_unlock(&blocks_lock);
    return block->at;
}

static int remove_block(const void *address) {
    pthread_mutex_lock(&blocks_lock);
    Block **place = &blocks, *block;
    while ((block = *place) && block->at != address)
        place = &block->next;
    if (block)
        *place = block->next;
    pthread_mutex_unlock(&blocks_lock);
    if (!block)
        return INVALID_VALUE;
    munmap(block->at, block->bytes);
    if (block->host != block->at)
        munmap(block->host, block->bytes);
    free(block);
    return OK;
}

/* ---- Streams, events, graphs */

typedef struct { pthread_mutex_t lock; pthread_cond_t changed; long recorded, reached; } Event;
typedef struct { void *to, *from; size_t bytes, width; uint32_t value; void (*call)(void *); Event *event; long number; int owned; } Step;
/* A graph is a list of steps and of other graphs, in the order in which they were added; a node is its number, from 1 on. */
typedef struct Graph { struct Node { Step step; struct Graph *child; } *nodes; size_t count, room; } Graph;
typedef struct Stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Step *steps;
    size_t count, done, room;
    long given, ended;
    int device, stop, capturing;
    Graph *graph;
} Stream;

static __thread void *stack[64];
static __thread int depth;
#define CURRENT (depth ? stack[depth - 1] : NULL)
#define CONTEXT(device) ((void *)(intptr_t)(1000 + (device)))
#define DEVICE(context) ((int)(intptr_t)(context) - 1000)

static void run(const Step *step) {
    if (step->call) {
        step->call(step->from);
    } else if (step->event && step->to) { /* wait */
        Event *event = step->event;
        pthread_mutex_lock(&event->lock);
        while (event->reached < step->number)
            pthread_cond_wait(&event->changed, &event->lock);
        pthread_mutex_unlock(&event->lock);
    } else if (step->event) {
        Event *event = step->event;
        pthread_mutex_lock(&event->lock);
        if (event->reached < step->number)
            event->reached = step->number;
        pthread_cond_broadcast(&event->changed);
        pthread_mutex_unlock(&event->lock);
    } else if (step->from) {
        memmove(fake_host(step->to), fake_host(step->from), step->bytes);
        if (step->owned)
            free(step->from);
    } else if (step->to) {
        char *to = fake_host(step->to);
        for (size_t i = 0; i < step->bytes; i++)
            memcpy(to + i * step->width, &step->value, step->width);
    }
}

static void *work(void *argument) {
    Stream *stream = argument;
    int delay = number("FAKE_CUDA_DELAY", 200);
    for (;;) {
        pthread_mutex_lock(&stream->lock);
        while (stream->done == stream->count && !stream->stop)
            pthread_cond_wait(&stream->changed, &stream->lock);
        if (stream->done == stream->count)
            break;
        Step step = stream->steps[stream->done];
        pthread_mutex_unlock(&stream->lock);
        if (delay)
            usleep((useconds_t)delay);
        run(&step);
        pthread_mutex_lock(&stream->lock);
        stream->done++;
        stream->ended++;
        pthread_cond_broadcast(&stream->changed);
        pthread_mutex_unlock(&stream->lock);
    }
    pthread_mutex_unlock(&stream->lock);
    free(stream->steps);
    free(stream);
    return NULL;
}

static Stream *new_stream(int device) {
    Stream *stream = calloc(1, sizeof *stream);
    pthread_t thread;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    stream->device = device;
    if (pthread_create(&thread, NULL, work, stream))
        return NULL;
    pthread_detach(thread);
    return stream;
}

static Stream *default_stream(void) {
    static Stream *streams[16];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    int device = DEVICE(CURRENT);
    pthread_mutex_lock(&lock);
    if (!streams[device])
        streams[device] = new_stream(device);
    pthread_mutex_unlock(&lock);
    return streams[device];
}
#define STREAM(handle) ((uintptr_t)(handle) < 3 ? default_stream() : (Stream *)(handle))

static void *append(Graph *graph, Step step, Graph *child) {
    if (graph->count == graph->room)
        graph->nodes = realloc(graph->nodes, (graph->room = 2 * graph->room + 16) * sizeof *graph->nodes);
    graph->nodes[graph->count++] = (struct Node){step, child};
    return (void *)graph->count;
}

static int put(void *handle, Step step) {
    if (!CURRENT)
        return INVALID_CONTEXT;
    Stream *stream = STREAM(handle);
    if (stream->capturing) {
        append(stream->graph, step, NULL);
        return OK;
    }
    pthread_mutex_lock(&stream->lock);
    if (stream->done == stream->count)
        stream->done = stream->count = 0;
    if (stream->count == stream->room)
        stream->steps = realloc(stream->steps, (stream->room = 2 * stream->room + 64) * sizeof step);
    stream->steps[stream->count++] = step;
    stream->given++;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return OK;
}

static int finish(Stream *stream) {
    if (stream->capturing)
        return IN_CAPTURE;
    pthread_mutex_lock(&stream->lock);
    long until = stream->given;
    while (stream->ended < until)
        pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    return OK;
}
