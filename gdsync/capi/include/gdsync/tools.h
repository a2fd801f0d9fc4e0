/* Memory that both a GPU and the CPU reach. Include gdsync.h first. */

#ifndef GDSYNC_TOOLS_H
#define GDSYNC_TOOLS_H

#ifndef __GDSYNC_H__
#error "include gdsync.h first"
#endif

GDS_BEGIN_DECLS

typedef struct gds_mem_desc {
    CUdeviceptr d_ptr; /* for the GPU */
    void *h_ptr; /* for the CPU */
    void *bar_ptr;
    int flags;
    size_t alloc_size;
    gdr_mh_t mh;
} gds_mem_desc_t;

/* flags: GDS_MEMORY_GPU or GDS_MEMORY_HOST. A CUDA context must be current. A size of 0 is 0, and allocates nothing. */
int gds_alloc_mapped_memory(gds_mem_desc_t *desc, size_t size, int flags);
int gds_free_mapped_memory(gds_mem_desc_t *desc);

GDS_END_DECLS

#endif
