/* Prints what the C compiler makes of the header. */

#include "check.h"

#define SIZE_OF(type) printf("sizeof " #type " %zu\n", sizeof(type))
#define OFFSET_OF(type, field) printf("offsetof " #type " " #field " %zu\n", offsetof(type, field))
#define NUMBER(name) printf(#name " %llu\n", (unsigned long long)(name))

int main(void) {
    gdr_info_t bits;
    uint32_t word;
    SIZE_OF(gdr_t);
    SIZE_OF(gdr_mh_t);
    SIZE_OF(gdr_info_v2_t);
    SIZE_OF(gdr_mapping_type_t);
    SIZE_OF(gdr_attr_t);
    OFFSET_OF(gdr_mh_t, h);
    OFFSET_OF(gdr_info_v2_t, va);
    OFFSET_OF(gdr_info_v2_t, mapped_size);
    OFFSET_OF(gdr_info_v2_t, page_size);
    OFFSET_OF(gdr_info_v2_t, tm_cycles);
    OFFSET_OF(gdr_info_v2_t, cycles_per_ms);
    OFFSET_OF(gdr_info_v2_t, mapping_type);
    NUMBER(GDR_API_MAJOR_VERSION);
    NUMBER(GDR_API_MINOR_VERSION);
    NUMBER(GPU_PAGE_SIZE);
    NUMBER(GDR_MAPPING_TYPE_NONE);
    NUMBER(GDR_MAPPING_TYPE_WC);
    NUMBER(GDR_MAPPING_TYPE_CACHING);
    NUMBER(GDR_MAPPING_TYPE_DEVICE);
    NUMBER(GDR_PIN_FLAG_FORCE_PCIE);
    NUMBER(GDR_ATTR_USE_PERSISTENT_MAPPING);
    NUMBER(GDR_ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE);
    NUMBER(GDR_ATTR_USING_DMA_BUF_MMAP);
    memset(&bits, 0, sizeof bits);
    bits.mapped = 1;
    memcpy(&word, (char *)&bits.cycles_per_ms + 4, 4);
    printf("mapped %u\n", word);
    bits.mapped = 0;
    bits.wc_mapping = 1;
    memcpy(&word, (char *)&bits.cycles_per_ms + 4, 4);
    printf("wc_mapping %u\n", word);
    return 0;
}
