/*
 * Sends that a CUDA stream triggers and completions that it waits for: the C interface of libgdsync 2.2, with the plain
 * verbs types of its direct-verbs port. Link with -lgdsync.
 *
 * A queue pair is created on the program's own ibv_context and ibv_pd, of a ConnectX card; memory is registered with
 * ibv_reg_mr. Receives are posted by the CPU; sends and waits go to a stream:
 *
 *     gds_qp_t *qp = gds_create_qp(pd, context, &attr, gpu, GDS_CREATE_QP_DEFAULT);
 *     gds_modify_qp(qp, ...);                     to INIT, RTR, RTS, as ibv_modify_qp
 *     gds_post_recv(qp, &recv_wr, &bad_recv_wr);
 *     gds_stream_queue_send(stream, qp, &send_wr, &bad_send_wr);
 *     gds_stream_wait_cq(stream, qp->recv_cq, 0);
 *     cuStreamSynchronize(stream);
 *     gds_poll_cq(qp->recv_cq, 1, &wc);           every completion, in order
 *     gds_destroy_qp(qp);
 *
 * Functions return 0 or an error number of <errno.h>, and gdsx_last_error() the reason. Any thread may call any of them;
 * a forked child gets EACCES. A failed request ends the waits for it; gds_poll_cq reports it.
 *
 * Environment:
 *     GDS_ENABLE_DEBUG            "1": messages of all levels on standard error; failures of calls are always there
 *     GDSYNC_CAPI_WAIT_LIMIT      seconds after which a wait fails; none by default: see gdsx_set_wait_limit
 */

#ifndef __GDSYNC_H__
#define __GDSYNC_H__

#include <infiniband/verbs.h>

#include <cuda.h>
#include <gdrapi.h>

#ifdef __cplusplus
#define GDS_BEGIN_DECLS extern "C" {
#define GDS_END_DECLS }
#else
#define GDS_BEGIN_DECLS
#define GDS_END_DECLS
#endif

#include <gdsync/core.h>

#endif
