/* The life of a mapping, from gdr_open to gdr_close. */

#include "check.h"

#undef gdr_get_info
/* What a program built before GDRCopy 2.4 has, with a guard behind. */
struct info_v1 {
    uint64_t va, mapped_size;
    uint32_t page_size;
    uint64_t tm_cycles;
    uint32_t cycles_per_ms;
    unsigned mapped : 1, wc_mapping : 1;
};
extern int gdr_get_info(gdr_t g, gdr_mh_t handle, struct info_v1 *info);

static void versions(gdr_t g) {
    int major = -1, minor = -1, value;
    gdr_runtime_get_version(&major, &minor);
    CHECK(major == GDR_API_MAJOR_VERSION && minor == GDR_API_MINOR_VERSION);
    major = minor = -1;
    GIVES(0, gdr_driver_get_version(g, &major, &minor));
    CHECK(major == 2 && minor == 6);
    value = -1;
    GIVES(0, gdr_get_attribute(g, GDR_ATTR_USE_PERSISTENT_MAPPING, &value));
    CHECK(value == 1);
    value = -1;
    GIVES(0, gdr_get_attribute(g, GDR_ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE, &value));
    CHECK(value == 0 || value == 1);
    value = -1;
    GIVES(0, gdr_get_attribute(g, GDR_ATTR_USING_DMA_BUF_MMAP, &value));
    CHECK(value == 0);
}

static void names(gdr_t g) {
    const char *expected[] = {"None", "Write Combining", "Caching", "Device"}, *name;
    char line[200], cut[8];
    int i;
    for (i = 0; i < 4; i++) {
        GIVES(0, gdr_get_mapping_type_string((gdr_mapping_type_t)i, &name));
        CHECK(strcmp(name, expected[i]) == 0);
    }
    CHECK(strcmp(gdrx_backend(g), "host") == 0);
    GIVES(0, gdrx_describe(g, line, sizeof line));
    CHECK(strncmp(line, "host", 4) == 0);
    memset(cut, 'x', sizeof cut);
    GIVES(ERANGE, gdrx_describe(g, cut, 4));
    CHECK(memcmp(cut, "hos\0xxxx", 8) == 0);
    GIVES(ERANGE, gdrx_describe(g, cut, 0));
    CHECK(cut[0] == 'h');
}

/* An address in the middle of a page can be pinned and mapped. */
static void unaligned(gdr_t g, unsigned long d) {
    unsigned long at = d + GPU_PAGE_SIZE + 4090;
    gdr_info_v2_t info;
    gdr_mh_t mh;
    void *base;
    char *p, seen[100], text[100];
    memset(text, 'u', sizeof text);
    GIVES(0, gdr_pin_buffer(g, at, sizeof text, 0, 0, &mh));
    GIVES(0, gdr_get_info_v2(g, mh, &info));
    CHECK(info.va <= at && at + sizeof text <= info.va + info.mapped_size);
    GIVES(0, gdr_map(g, mh, &base, sizeof text));
    p = (char *)base + (at - info.va);
    /* All of it can be reached although the mapping begins before it. */
    GIVES(0, gdr_copy_to_mapping(mh, p, text, sizeof text));
    GIVES(0, gdrx_copy_out(g, seen, at, sizeof seen));
    CHECK(memcmp(seen, text, sizeof text) == 0);
    GIVES(0, gdr_unmap(g, mh, base, sizeof text));
    GIVES(0, gdr_unpin_buffer(g, mh));
}

/* Tokens of CUDA make no difference. */
static void tokens(gdr_t g, unsigned long d) {
    gdr_mh_t mh;
    void *base;
    uint32_t word = 0x87654321, seen = 0;
    GIVES(0, gdr_pin_buffer(g, d, GPU_PAGE_SIZE, 0x123456789abcdef, 0x98765432, &mh));
    GIVES(0, gdr_map(g, mh, &base, GPU_PAGE_SIZE));
    GIVES(0, gdr_copy_to_mapping(mh, (char *)base + 128, &word, sizeof word));
    GIVES(0, gdrx_copy_out(g, &seen, d + 128, sizeof seen));
    CHECK(seen == word);
    GIVES(0, gdr_unmap(g, mh, base, GPU_PAGE_SIZE));
    GIVES(0, gdr_unpin_buffer(g, mh));
}

/* Two pins of the same memory, each mapped, show the same bytes. */
static void twice(gdr_t g, unsigned long d) {
    gdr_mh_t one, two;
    void *p, *q;
    uint32_t word = 0x12345678, seen = 0;
    GIVES(0, gdr_pin_buffer(g, d, GPU_PAGE_SIZE, 0, 0, &one));
    GIVES(0, gdr_pin_buffer_v2(g, d, GPU_PAGE_SIZE, GDR_PIN_FLAG_DEFAULT, &two));
    CHECK(one.h != two.h && one.h != 0 && two.h != 0);
    GIVES(0, gdr_map(g, one, &p, GPU_PAGE_SIZE));
    GIVES(0, gdr_map(g, two, &q, GPU_PAGE_SIZE));
    CHECK(p != q);
    GIVES(0, gdr_copy_to_mapping(one, (char *)p + 64, &word, sizeof word));
    GIVES(0, gdr_copy_from_mapping(two, &seen, (char *)q + 64, sizeof seen));
    CHECK(seen == word);
    GIVES(0, gdr_unmap(g, one, p, GPU_PAGE_SIZE));
    GIVES(0, gdr_unpin_buffer(g, one));
    GIVES(0, gdr_copy_from_mapping(two, &seen, (char *)q + 64, sizeof seen));
    GIVES(0, gdr_unmap(g, two, q, GPU_PAGE_SIZE));
    GIVES(0, gdr_unpin_buffer(g, two));
}

int main(void) {
    static char data[SIZE], seen[SIZE];
    struct {
        struct info_v1 v1;
        uint64_t guard;
    } old;
    unsigned long d;
    gdr_info_v2_t info;
    gdr_mh_t mh;
    void *base;
    char *p;
    int flag = -1;
    size_t i;
    gdr_t g = gdr_open();
    CHECK(g != NULL);
    versions(g);
    names(g);

    GIVES(0, gdrx_alloc(g, 0, SIZE, &d));
    GIVES(0, gdr_pin_buffer(g, d, SIZE, 0, 0, &mh));
    memset(&info, 0xff, sizeof info);
    GIVES(0, gdr_get_info_v2(g, mh, &info));
    CHECK(info.va <= d && info.va + info.mapped_size >= d + SIZE);
    CHECK(info.page_size >= 4096 && info.va % info.page_size == 0 && info.mapped_size % info.page_size == 0);
    CHECK(info.mapped == 0 && info.wc_mapping == 0 && info.mapping_type == GDR_MAPPING_TYPE_NONE);
    CHECK(info.tm_cycles == 0 && info.cycles_per_ms == 0);

    GIVES(0, gdr_map(g, mh, &base, SIZE));
    GIVES(0, gdr_get_info_v2(g, mh, &info));
    CHECK(info.mapped == 1 && info.mapping_type != GDR_MAPPING_TYPE_NONE);
    CHECK(info.wc_mapping == (info.mapping_type == GDR_MAPPING_TYPE_WC));
    old.guard = 0xabcdef;
    GIVES(0, gdr_get_info(g, mh, &old.v1));
    CHECK(old.guard == 0xabcdef);
    CHECK(old.v1.va == info.va && old.v1.mapped_size == info.mapped_size && old.v1.page_size == info.page_size);
    CHECK(old.v1.mapped == 1 && old.v1.wc_mapping == info.wc_mapping);
    GIVES(0, gdr_get_callback_flag(g, mh, &flag));
    CHECK(flag == 0);

    p = (char *)base + (d - info.va);
    GIVES(0, gdrx_copy_in(g, d, data, SIZE));
    for (i = 0; i < SIZE; i++)
        CHECK(p[i] == 0);
    for (i = 0; i < SIZE; i++)
        data[i] = (char)(i * 7 + i / 251);
    GIVES(0, gdr_copy_to_mapping(mh, p + 3, data + 3, SIZE - 3));
    GIVES(0, gdrx_copy_out(g, seen, d, SIZE));
    CHECK(seen[0] == 0 && memcmp(seen + 3, data + 3, SIZE - 3) == 0);
    GIVES(0, gdrx_copy_in(g, d + 5, "hello", 5));
    GIVES(0, gdr_copy_from_mapping(mh, seen, p, SIZE));
    CHECK(memcmp(seen + 3, data + 3, 2) == 0 && memcmp(seen + 5, "hello", 5) == 0);
    CHECK(memcmp(seen + 10, data + 10, SIZE - 10) == 0);
    GIVES(0, gdr_copy_to_mapping(mh, p, NULL, 0));
    GIVES(0, gdr_copy_from_mapping(mh, NULL, p, 0));

    /* Again, with the type it had. */
    GIVES(0, gdr_unmap(g, mh, base, SIZE));
    GIVES(0, gdr_map_v2(g, mh, &base, GPU_PAGE_SIZE, (int)info.mapping_type));
    GIVES(0, gdr_copy_from_mapping(mh, seen, (char *)base + (d - info.va) + 5, 5));
    CHECK(memcmp(seen, "hello", 5) == 0);
    /* Rounded up to pages of the GPU in one call and not in the other. */
    GIVES(0, gdr_unmap(g, mh, base, GPU_PAGE_SIZE - 100));
    GIVES(0, gdr_get_info_v2(g, mh, &info));
    CHECK(info.mapped == 0 && info.mapping_type == GDR_MAPPING_TYPE_NONE);
    GIVES(0, gdr_unpin_buffer(g, mh));

    unaligned(g, d);
    twice(g, d);
    tokens(g, d);

    /* A mapping outlives its memory. */
    GIVES(0, gdr_pin_buffer(g, d, SIZE, 0, 0, &mh));
    GIVES(0, gdr_map(g, mh, &base, SIZE));
    GIVES(0, gdrx_free(g, d));
    GIVES(0, gdr_copy_from_mapping(mh, seen, (char *)base + (d - info.va) + 5, 5));
    CHECK(memcmp(seen, "hello", 5) == 0);
    GIVES(0, gdr_unmap(g, mh, base, SIZE));
    GIVES(0, gdr_unpin_buffer(g, mh));
    GIVES(0, gdr_close(g));
    return 0;
}
