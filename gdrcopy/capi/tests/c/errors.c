/* What is refused, and with which error number. */

#include "check.h"

static void handles(void) {
    struct mapped m = open_and_map();
    gdr_t other = gdr_open();
    gdr_mh_t none = {0}, wild = {0x7f1234567890}, far = {~0ul}, reused;
    gdr_info_t info;
    void *base;
    char word[4] = "old", before[8];
    int flag;
    CHECK(other != NULL && other != m.g);

    /* A handle of another gdr_t, and no handle at all. */
    GIVES(EINVAL, gdr_unpin_buffer(other, m.mh));
    GIVES(EINVAL, gdr_unmap(other, m.mh, m.base, SIZE));
    GIVES(EINVAL, gdr_get_info(other, m.mh, &info));
    GIVES(EINVAL, gdr_get_info(m.g, none, &info));
    GIVES(EINVAL, gdr_get_callback_flag(m.g, wild, &flag));
    GIVES(EINVAL, gdr_map(m.g, far, &base, SIZE));
    GIVES(EINVAL, gdr_unpin_buffer(m.g, none));
    GIVES(EINVAL, gdr_copy_to_mapping(none, m.p, word, 4));
    GIVES(EINVAL, gdr_copy_to_mapping(wild, m.p, word, 4));
    GIVES(EINVAL, gdr_copy_from_mapping(far, word, m.p, 4));
    GIVES(EINVAL, gdr_copy_from_mapping(none, word, m.p, 0));

    /* Unpinned twice; its place is taken by another, which the old handle does not reach. */
    GIVES(0, gdr_unpin_buffer(m.g, m.mh));
    GIVES(EINVAL, gdr_copy_to_mapping(m.mh, m.p, word, 4));
    GIVES(EINVAL, gdr_unpin_buffer(m.g, m.mh));
    GIVES(EINVAL, gdr_unmap(m.g, m.mh, m.base, SIZE));
    GIVES(0, gdr_pin_buffer(m.g, m.d, SIZE, 0, 0, &reused));
    CHECK(reused.h != m.mh.h);
    GIVES(0, gdr_map(m.g, reused, &base, SIZE));
    GIVES(0, gdrx_copy_out(m.g, before, m.d, 8));
    GIVES(EINVAL, gdr_copy_to_mapping(m.mh, base, "bad", 4));
    GIVES(EINVAL, gdr_unmap(m.g, m.mh, base, SIZE));
    GIVES(EINVAL, gdr_unpin_buffer(m.g, m.mh));
    GIVES(0, gdr_copy_from_mapping(reused, word, base, 4));
    CHECK(memcmp(word, before, 4) == 0);
    GIVES(0, gdr_close(other));
    GIVES(0, gdr_unmap(m.g, reused, base, SIZE));
    GIVES(0, gdr_close(m.g));

    /* Closed twice, and used after. */
    GIVES(EINVAL, gdr_close(m.g));
    GIVES(EINVAL, gdr_unpin_buffer(m.g, reused));
    GIVES(EINVAL, gdr_pin_buffer(m.g, m.d, SIZE, 0, 0, &reused));
    GIVES(EINVAL, gdrx_free(m.g, m.d));
    GIVES(EINVAL, gdr_close(NULL));
    GIVES(EINVAL, gdr_close((gdr_t)word));
    CHECK(gdrx_backend(m.g) == NULL);
}

static void pins(void) {
    struct mapped m = open_and_map();
    gdr_mh_t mh = {77};
    char local[16];
    GIVES(EINVAL, gdr_pin_buffer_v2(m.g, m.d, SIZE, 2, &mh));
    GIVES(EINVAL, gdr_pin_buffer_v2(m.g, m.d, SIZE, GDR_PIN_FLAG_FORCE_PCIE, &mh));
    GIVES(EINVAL, gdr_pin_buffer_v2(m.g, m.d, SIZE, 0x80000000u, &mh));
    GIVES(EINVAL, gdr_pin_buffer(m.g, 0, SIZE, 0, 0, &mh));
    GIVES(EINVAL, gdr_pin_buffer(m.g, m.d, 0, 0, 0, &mh));
    GIVES(EINVAL, gdr_pin_buffer(m.g, m.d, ~(size_t)0, 0, 0, &mh));
    GIVES(EINVAL, gdr_pin_buffer(m.g, m.d, SIZE + 1, 0, 0, &mh));
    GIVES(EINVAL, gdr_pin_buffer(m.g, m.d, SIZE, 0, 0, NULL));
    GIVES(EINVAL, gdr_pin_buffer(m.g, (unsigned long)local, 8, 0, 0, &mh));
    CHECK(mh.h == 77);
    GIVES(0, gdr_close(m.g));
}

static void maps(void) {
    struct mapped m = open_and_map();
    gdr_info_t info;
    void *base = NULL;
    GIVES(EAGAIN, gdr_map(m.g, m.mh, &base, SIZE));
    GIVES(EAGAIN, gdr_map_v2(m.g, m.mh, &base, SIZE, 9));
    GIVES(EINVAL, gdr_unmap(m.g, m.mh, (char *)m.base + 4096, SIZE));
    GIVES(EINVAL, gdr_unmap(m.g, m.mh, NULL, SIZE));
    GIVES(EINVAL, gdr_unmap(m.g, m.mh, m.base, SIZE + 1));
    GIVES(EINVAL, gdr_unmap(m.g, m.mh, m.base, SIZE - GPU_PAGE_SIZE));
    GIVES(EINVAL, gdr_unmap(m.g, m.mh, m.base, 0));
    GIVES(EINVAL, gdr_unmap(m.g, m.mh, m.base, ~(size_t)0));
    GIVES(0, gdr_unmap(m.g, m.mh, m.base, SIZE));
    GIVES(EINVAL, gdr_unmap(m.g, m.mh, m.base, SIZE));
    GIVES(0, gdr_get_info(m.g, m.mh, &info));
    GIVES(EINVAL, gdr_map(m.g, m.mh, &base, 0));
    GIVES(EINVAL, gdr_map(m.g, m.mh, &base, info.mapped_size + 1));
    GIVES(EINVAL, gdr_map(m.g, m.mh, &base, ~(size_t)0));
    GIVES(EINVAL, gdr_map(m.g, m.mh, NULL, SIZE));
    GIVES(EINVAL, gdr_map_v2(m.g, m.mh, &base, SIZE, 4));
    GIVES(EINVAL, gdr_map_v2(m.g, m.mh, &base, SIZE, -1));
    GIVES(EOPNOTSUPP, gdr_map_v2(m.g, m.mh, &base, SIZE, GDR_MAP_FLAG_REQ_DEVICE_MAPPING));
    CHECK(base == NULL);
    GIVES(0, gdr_map(m.g, m.mh, &base, info.mapped_size));
    GIVES(0, gdr_close(m.g));
}

static void copies(void) {
    struct mapped m = open_and_map();
    static char data[SIZE + 1];
    char *end;
    gdr_info_t info;
    GIVES(0, gdr_get_info(m.g, m.mh, &info));
    end = (char *)m.base + info.mapped_size;
    GIVES(0, gdr_copy_to_mapping(m.mh, m.base, data, info.mapped_size));
    GIVES(0, gdr_copy_from_mapping(m.mh, data, end - 1, 1));
    GIVES(EINVAL, gdr_copy_to_mapping(m.mh, end, data, 1));
    GIVES(EINVAL, gdr_copy_to_mapping(m.mh, end - 1, data, 2));
    GIVES(EINVAL, gdr_copy_to_mapping(m.mh, (char *)m.base - 1, data, 1));
    GIVES(EINVAL, gdr_copy_to_mapping(m.mh, NULL, data, 1));
    GIVES(EINVAL, gdr_copy_to_mapping(m.mh, m.base, NULL, 1));
    GIVES(EINVAL, gdr_copy_to_mapping(m.mh, m.base, data, ~(size_t)0));
    GIVES(EINVAL, gdr_copy_from_mapping(m.mh, data, end, 1));
    GIVES(EINVAL, gdr_copy_from_mapping(m.mh, data, end - 3, 4));
    GIVES(EINVAL, gdr_copy_from_mapping(m.mh, data, (char *)m.base - 1, 4));
    GIVES(EINVAL, gdr_copy_from_mapping(m.mh, NULL, m.base, 4));
    GIVES(EINVAL, gdr_copy_from_mapping(m.mh, data, (char *)m.base + 8, ~(size_t)0 - 4));
    GIVES(0, gdr_unmap(m.g, m.mh, m.base, SIZE));
    GIVES(EINVAL, gdr_copy_to_mapping(m.mh, m.base, data, 1));
    GIVES(EINVAL, gdr_copy_to_mapping(m.mh, m.base, data, 0));
    GIVES(EINVAL, gdr_copy_from_mapping(m.mh, data, m.base, 1));
    GIVES(0, gdr_close(m.g));
}

static void questions(void) {
    struct mapped m = open_and_map();
    const char *name = NULL;
    int a = 5, b = 6;
    GIVES(EINVAL, gdr_get_attribute(m.g, (gdr_attr_t)0, &a));
    GIVES(EINVAL, gdr_get_attribute(m.g, GDR_ATTR_MAX, &a));
    GIVES(EINVAL, gdr_get_attribute(m.g, GDR_ATTR_USE_PERSISTENT_MAPPING, NULL));
    GIVES(EINVAL, gdr_get_mapping_type_string(GDR_MAPPING_TYPE_MAX, &name));
    GIVES(EINVAL, gdr_get_mapping_type_string(GDR_MAPPING_TYPE_WC, NULL));
    GIVES(EINVAL, gdr_driver_get_version(m.g, NULL, &b));
    GIVES(EINVAL, gdr_driver_get_version(NULL, &a, &b));
    gdr_runtime_get_version(NULL, &b);
    GIVES(EINVAL, gdr_get_info(m.g, m.mh, NULL));
    GIVES(EINVAL, gdr_get_callback_flag(m.g, m.mh, NULL));
    GIVES(EINVAL, gdrx_describe(m.g, NULL, 10));
    CHECK(name == NULL && a == 5 && b == 6);
    GIVES(0, gdr_close(m.g));
}

static void buffers(void) {
    struct mapped m = open_and_map();
    unsigned long d = 9;
    char bytes[8];
    GIVES(EINVAL, gdrx_alloc(m.g, 0, 0, &d));
    GIVES(EINVAL, gdrx_alloc(m.g, 0, ~(size_t)0, &d));
    GIVES(EINVAL, gdrx_alloc(m.g, 77, SIZE, &d));
    GIVES(EINVAL, gdrx_alloc(m.g, -1, SIZE, &d));
    GIVES(EINVAL, gdrx_alloc(m.g, 0, SIZE, NULL));
    GIVES(EINVAL, gdrx_copy_in(m.g, m.d + SIZE - 4, bytes, 8));
    GIVES(EINVAL, gdrx_copy_in(m.g, m.d + SIZE, bytes, 1));
    GIVES(EINVAL, gdrx_copy_in(m.g, m.d - 1, bytes, 1));
    GIVES(EINVAL, gdrx_copy_in(m.g, m.d, NULL, 1));
    GIVES(EINVAL, gdrx_copy_out(m.g, bytes, m.d + SIZE - 4, 8));
    GIVES(EINVAL, gdrx_copy_out(m.g, bytes, m.d + 8, ~(size_t)0));
    GIVES(EINVAL, gdrx_copy_out(m.g, NULL, m.d, 1));
    GIVES(EINVAL, gdrx_free(m.g, m.d + 8));
    GIVES(0, gdrx_free(m.g, m.d));
    GIVES(EINVAL, gdrx_free(m.g, m.d));
    CHECK(d == 9);
    GIVES(0, gdr_close(m.g));
}

int main(void) {
    handles();
    pins();
    maps();
    copies();
    questions();
    buffers();
    return 0;
}
