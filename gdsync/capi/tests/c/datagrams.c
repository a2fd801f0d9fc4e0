/* Datagrams to another queue pair and to oneself, in stream order and by the CPU, with their sender. */

#include <endian.h>

#include "check.h"

enum { QKEY = 0x11111111, GRH = 40, LEN = 100 };

static struct side s;

static gds_qp_t *ready_qp(void)
{
    gds_qp_init_attr_t init = {.cap = {16, 16, 1, 1, 64}, .qp_type = IBV_QPT_UD};
    gds_qp_t *qp = gds_create_qp(s.pd, s.context, &init, 0, GDS_CREATE_QP_DEFAULT);
    TRUE(qp);
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY};
    OK(gds_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
    a.qp_state = IBV_QPS_RTR;
    OK(gds_modify_qp(qp, &a, IBV_QP_STATE));
    a.qp_state = IBV_QPS_RTS;
    a.sq_psn = 7;
    OK(gds_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN));
    return qp;
}

static struct ibv_ah *address_of(struct place to)
{
    struct ibv_ah_attr a;
    memset(&a, 0, sizeof a);
    a.dlid = to.lid;
    a.port_num = 1;
    a.is_global = to.lid == 0;
    a.grh.dgid = to.gid;
    a.grh.sgid_index = 1;
    a.grh.hop_limit = 1;
    return ibv_create_ah(s.pd, &a);
}

static void message(gds_qp_t *from, gds_qp_t *to, unsigned value, int by_cpu)
{
    struct place at = place_of(&s, to);
    struct ibv_ah *ah = address_of(at);
    TRUE(ah);
    struct ibv_sge sge;
    struct ibv_send_wr wr = send_of(&s, &sge, value, 4096, LEN), *bad = NULL;
    wr.opcode = IBV_WR_SEND_WITH_IMM;
    wr.imm_data = htobe32(value);
    wr.wr.ud.remote_qpn = at.qpn;
    wr.wr.ud.remote_qkey = QKEY;
    CHECK(gds_post_send(from, &wr, &bad), EINVAL);
    TRUE(bad == &wr);
    wr.wr.ud.ah = ah;
    memset(s.bytes + 4096, (int)value, LEN);
    OK(post_receive(&s, to, value, 0, GRH + LEN));
    if (by_cpu) {
        OK(gds_post_send(from, &wr, &bad));
    } else {
        OK(gds_stream_queue_send(s.stream, from, &wr, &bad));
        OK(gds_stream_wait_cq(s.stream, to->recv_cq, 0));
        OK(gds_stream_wait_cq(s.stream, from->send_cq, 0));
        OK(cuStreamSynchronize(s.stream));
    }
    struct ibv_wc wc = poll_one(from->send_cq);
    CHECK(wc.status, IBV_WC_SUCCESS);
    wc = poll_one(to->recv_cq);
    CHECK(wc.status, IBV_WC_SUCCESS);
    CHECK(wc.wr_id, value);
    CHECK(wc.byte_len, GRH + LEN);
    CHECK(wc.src_qp, from->qp->qp_num);
    CHECK(wc.slid, at.lid);
    CHECK(wc.wc_flags, IBV_WC_WITH_IMM | (at.lid ? 0 : IBV_WC_GRH));
    CHECK(be32toh(wc.imm_data), value);
    for (int i = 0; i < LEN; i++)
        CHECK(s.bytes[GRH + i], value);
    OK(ibv_destroy_ah(ah));
}

int main(void)
{
    s = open_side();
    gds_qp_t *a = ready_qp(), *b = ready_qp();
    for (unsigned round = 1; round < 100; round += 4) {
        message(a, b, round, 0);
        message(b, a, round + 1, 1);
        message(a, a, round + 2, 0);
        message(b, b, round + 3, 1);
    }
    /* Only datagrams. */
    struct ibv_sge sge;
    struct ibv_send_wr wr = send_of(&s, &sge, 1, 0, 4), *bad = NULL;
    wr.opcode = IBV_WR_RDMA_WRITE;
    wr.wr.ud.ah = address_of(place_of(&s, b));
    CHECK(gds_post_send(a, &wr, &bad), EINVAL);
    OK(ibv_destroy_ah(wr.wr.ud.ah));
    OK(gds_destroy_qp(a));
    OK(gds_destroy_qp(b));
    close_side(&s);
    return 0;
}
