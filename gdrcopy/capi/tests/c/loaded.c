/* The library loaded at run time, as communication libraries do it, and closed: it stays. */

#include "check.h"

#include <dlfcn.h>

static void *library;

/* A function of the library; ISO C has no conversion from the pointer that dlsym gives. */
static void find(void *function, const char *name) {
    void *symbol = dlsym(library, name);
    if (symbol == NULL)
        fprintf(stderr, "%s\n", dlerror());
    CHECK(symbol != NULL);
    memcpy(function, &symbol, sizeof symbol);
}

#define FIND(result, name, ...)                                                                                        \
    result (*name)(__VA_ARGS__);                                                                                       \
    find(&name, "gdr_" #name)

static void life(void) {
    FIND(gdr_t, open, void);
    FIND(int, close, gdr_t);
    FIND(int, pin_buffer, gdr_t, unsigned long, size_t, uint64_t, uint32_t, gdr_mh_t *);
    FIND(int, unpin_buffer, gdr_t, gdr_mh_t);
    FIND(int, get_info_v2, gdr_t, gdr_mh_t, gdr_info_v2_t *);
    FIND(int, map, gdr_t, gdr_mh_t, void **, size_t);
    FIND(int, unmap, gdr_t, gdr_mh_t, void *, size_t);
    FIND(void, runtime_get_version, int *, int *);
    FIND(int, driver_get_version, gdr_t, int *, int *);
    FIND(int, copy_to_mapping, gdr_mh_t, void *, const void *, size_t);
    FIND(int, copy_from_mapping, gdr_mh_t, void *, const void *, size_t);
    int (*alloc)(gdr_t, int, size_t, unsigned long *);
    /* The name without a number fills the old structure. */
    int (*info_v1)(gdr_t, gdr_mh_t, void *);
    gdr_info_v2_t info;
    uint64_t old[6];
    gdr_mh_t mh;
    unsigned long d;
    void *base;
    char *p, word[4];
    int major, minor;
    gdr_t g;
    find(&alloc, "gdrx_alloc");
    find(&info_v1, "gdr_get_info");

    runtime_get_version(&major, &minor);
    CHECK(major == 2 && minor == 6);
    g = open();
    CHECK(g != NULL);
    GIVES(0, driver_get_version(g, &major, &minor));
    GIVES(0, alloc(g, 0, SIZE, &d));
    GIVES(0, pin_buffer(g, d, SIZE, 0, 0, &mh));
    GIVES(0, map(g, mh, &base, SIZE));
    GIVES(0, get_info_v2(g, mh, &info));
    memset(old, 0x5a, sizeof old);
    GIVES(0, info_v1(g, mh, old));
    CHECK(old[0] == info.va && old[1] == info.mapped_size && old[5] == 0x5a5a5a5a5a5a5a5a);
    p = (char *)base + (d - info.va);
    GIVES(0, copy_to_mapping(mh, p, "nvl", 4));
    GIVES(0, copy_from_mapping(mh, word, p, 4));
    CHECK(memcmp(word, "nvl", 4) == 0);
    GIVES(0, unmap(g, mh, base, SIZE));
    GIVES(0, unpin_buffer(g, mh));
    GIVES(0, close(g));
}

int main(void) {
    int round;
    CHECK(dlopen("libgdrapi.so.2", RTLD_NOW | RTLD_NOLOAD) == NULL);
    library = dlopen("libgdrapi.so.2", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    CHECK(dlclose(library) == 0);
    /* Without a call no data of this thread keeps it. */
    library = dlopen("libgdrapi.so.2", RTLD_NOW | RTLD_NOLOAD);
    CHECK(library != NULL);
    CHECK(dlclose(library) == 0);
    for (round = 0; round < 3; round++) {
        pid_t child;
        library = dlopen("libgdrapi.so.2", RTLD_NOW | RTLD_LOCAL);
        if (library == NULL)
            fprintf(stderr, "%s\n", dlerror());
        CHECK(library != NULL);
        life();
        child = fork();
        if (child == 0) {
            life();
            _exit(0);
        }
        CHECK(ended(child) == 0);
        CHECK(dlclose(library) == 0);
        /* What it left with the C library for fork is still there. */
        child = fork();
        if (child == 0)
            _exit(0);
        CHECK(ended(child) == 0);
    }
    return 0;
}
