/* Prepared sends and waits as words, for kernels: see device.cuh. Include gdsync.h first. */

#ifndef GDSYNC_MLX5_H
#define GDSYNC_MLX5_H

#ifndef __GDSYNC_H__
#error "include gdsync.h first"
#endif

GDS_BEGIN_DECLS

typedef struct gds_mlx5_dword_wait_info {
    uint32_t *ptr;
    uint32_t value;
} gds_mlx5_dword_wait_info_t;

/* The address of a word on the GPU of the current context. */
int gds_mlx5_get_dword_wait_info(uint32_t *ptr, uint32_t value, int flags, gds_mlx5_dword_wait_info_t *mlx5_info);

/* The kernel writes dbrec_value, a system-scope fence, db_value. */
typedef struct gds_mlx5_send_info {
    unsigned membar : 1;
    unsigned membar_full : 1;
    uint32_t *dbrec_ptr;
    uint32_t dbrec_value;
    uint64_t *db_ptr;
    uint64_t db_value;
} gds_mlx5_send_info_t;

/*
 * Requests count as posted. One that is refused is taken back; if the queue pair breaks in the middle of a list of sends, those before
 * count as posted and are flushed.
 */
int gds_mlx5_get_send_info(int count, const gds_send_request_t *requests, gds_mlx5_send_info_t *mlx5_infos);

/* The kernel waits until cqe_ptr satisfies the condition, then writes flag_value to flag_ptr. */
typedef struct gds_mlx5_wait_info {
    gds_wait_cond_flag_t cond;
    uint32_t *cqe_ptr;
    uint32_t cqe_value;
    uint32_t *flag_ptr;
    uint32_t flag_value;
} gds_mlx5_wait_info_t;

int gds_mlx5_get_wait_info(int count, const gds_wait_request_t *requests, gds_mlx5_wait_info_t *mlx5_infos);

GDS_END_DECLS

#endif
