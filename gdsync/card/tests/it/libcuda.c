/* A CUDA driver of one GPU, whose memory a CPU cannot touch: its addresses have no access rights, and copies go by another mapping. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK, INVALID_VALUE, NOT_FOUND = 500 };
#define API __attribute__((visibility("default"))) int

static struct { char *gpu, *cpu; size_t len; int fd; } memories[16];
static int count;

/* How the CPU of this driver reaches an address. */
static char *find(uint64_t addr)
{
    for (int i = 0; i < count; i++)
        if (addr - (uint64_t)memories[i].gpu < memories[i].len)
            return memories[i].cpu + (addr - (uint64_t)memories[i].gpu);
    return (char *)addr;
}

API cuInit(unsigned flags) { (void)flags; return OK; }
API cuDriverGetVersion(int *version) { *version = 13000; return OK; }
API cuDeviceGetCount(int *n) { *n = 1; return OK; }
API cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? INVALID_VALUE : OK; }
API cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    *value = attribute == 118 ? 100 : 1; /* WRITES_ORDERING: for the owner */
    return OK;
}
API cuDeviceGetPCIBusId(char *id, int len, int device) { (void)device; strncpy(id, "0000:00:00.0", len); return OK; }
API cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = memories; return OK; }
API cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return OK; }
API cuCtxPushCurrent_v2(void *context) { (void)context; return OK; }
API cuCtxPopCurrent_v2(void **context) { *context = memories; return OK; }
API cuThreadExchangeStreamCaptureMode(int *mode) { *mode = 0; return OK; }
API cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return OK; }
API cuStreamCreateWithPriority(void **stream, unsigned flags, int priority)
{
    (void)flags, (void)priority;
    *stream = memories;
    return OK;
}
API cuStreamQuery(void *stream) { (void)stream; return OK; }
API cuStreamDestroy_v2(void *stream) { (void)stream; return OK; }

API cuPointerGetAttribute(void *data, int attribute, uint64_t addr)
{
    int i = 0;
    while (i < count && addr - (uint64_t)memories[i].gpu >= memories[i].len)
        i++;
    if (i == count)
        return INVALID_VALUE;
    switch (attribute) {
    case 2: *(unsigned *)data = 2; break; /* MEMORY_TYPE: device */
    case 7: *(uint64_t *)data = i + 1; break; /* BUFFER_ID */
    case 9: *(int *)data = 0; break; /* DEVICE_ORDINAL */
    case 11: *(uint64_t *)data = (uint64_t)memories[i].gpu; break; /* RANGE_START_ADDR */
    case 12: *(size_t *)data = memories[i].len; break; /* RANGE_SIZE */
    default: return INVALID_VALUE;
    }
    return OK;
}
API cuPointerGetAttributes(unsigned n, const int *attributes, void **data, uint64_t addr)
{
    for (unsigned i = 0; i < n; i++)
        cuPointerGetAttribute(data[i], attributes[i], addr);
    return OK;
}

API cuMemAlloc_v2(uint64_t *addr, size_t len)
{
    int fd = memfd_create("gpu", 0);
    if (fd < 0 || ftruncate(fd, len) || count == 16)
        return INVALID_VALUE;
    memories[count].fd = fd;
    memories[count].len = len;
    memories[count].cpu = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    memories[count].gpu = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *addr = (uint64_t)memories[count++].gpu;
    return OK;
}
API cuMemGetHandleForAddressRange(int *fd, uint64_t addr, size_t len, int kind, uint64_t flags)
{
    (void)len, (void)kind, (void)flags;
    for (int i = 0; i < count; i++)
        if ((uint64_t)memories[i].gpu == addr)
            return (*fd = dup(memories[i].fd)) < 0;
    return INVALID_VALUE;
}
API cuMemcpyAsync(uint64_t to, uint64_t from, size_t len, void *stream)
{
    (void)stream;
    memcpy(find(to), find(from), len);
    return OK;
}
API cuStreamBatchMemOp_v2(void *stream, unsigned n, void *ops, unsigned flags)
{
    (void)stream, (void)flags;
    for (unsigned i = 0; i < n; i++) { /* WRITE_VALUE_32: operation 2, address at 8, value at 16 */
        char *op = (char *)ops + 48 * i;
        if (*(unsigned *)op != 2)
            return INVALID_VALUE;
        __atomic_store_n((uint32_t *)find(*(uint64_t *)(op + 8)), *(uint32_t *)(op + 16), __ATOMIC_RELEASE);
    }
    return OK;
}

/* The flag IOMEMORY is refused for ordinary pages. */
API cuMemHostRegister_v2(void *addr, size_t len, unsigned flags) { (void)addr, (void)len; return flags & 4 ? INVALID_VALUE : OK; }
API cuMemHostUnregister(void *addr) { (void)addr; return OK; }
API cuMemHostGetDevicePointer_v2(uint64_t *device, void *host, unsigned flags)
{
    (void)flags;
    *device = (uint64_t)host;
    return OK;
}
API cuGetProcAddress_v2(const char *name, void **place, int version, uint64_t flags, int *status)
{
    (void)version, (void)flags, (void)status;
    *place = strcmp(name, "cuMemHostRegister") ? strcmp(name, "cuGetProcAddress") ? NULL : (void *)cuGetProcAddress_v2
                                               : (void *)cuMemHostRegister_v2;
    return *place ? OK : NOT_FOUND;
}
