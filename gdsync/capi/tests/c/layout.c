/* Prints the numbers of the headers, to be compared with those of the library. */

#include <stdio.h>

#include <gdsync.h>
#include <gdsync/mlx5.h>
#include <gdsync/tools.h>

#define SIZE(type) printf("sizeof " #type " %zu\n", sizeof(type))
#define AT(type, field) printf("offsetof " #type " " #field " %zu\n", offsetof(type, field))
#define VALUE(name) printf(#name " %zu\n", (size_t)(name))

int main(void)
{
    SIZE(gds_cq_t);
    AT(gds_cq_t, curr_offset);
    SIZE(gds_qp_t);
    AT(gds_qp_t, send_cq);
    AT(gds_qp_t, recv_cq);
    AT(gds_qp_t, dev_context);
    SIZE(gds_send_request_t);
    SIZE(gds_wait_request_t);
    SIZE(gds_wait_value32_t);
    AT(gds_wait_value32_t, cond_flags);
    AT(gds_wait_value32_t, flags);
    SIZE(gds_write_value32_t);
    AT(gds_write_value32_t, flags);
    SIZE(gds_write_memory_t);
    AT(gds_write_memory_t, flags);
    SIZE(gds_descriptor_t);
    AT(gds_descriptor_t, send);
    AT(gds_descriptor_t, writemem);
    SIZE(gds_mem_desc_t);
    AT(gds_mem_desc_t, alloc_size);
    AT(gds_mem_desc_t, mh);
    SIZE(gds_mlx5_dword_wait_info_t);
    SIZE(gds_mlx5_send_info_t);
    AT(gds_mlx5_send_info_t, dbrec_ptr);
    AT(gds_mlx5_send_info_t, db_value);
    SIZE(gds_mlx5_wait_info_t);
    AT(gds_mlx5_wait_info_t, cqe_ptr);
    AT(gds_mlx5_wait_info_t, flag_value);
    VALUE(GDS_API_VERSION);
    return 0;
}
