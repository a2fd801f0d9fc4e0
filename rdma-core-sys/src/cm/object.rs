//! Identifiers, events and parameters of connections.

use std::ffi::{c_int, c_void};

use libc::sockaddr_storage;

use crate::abi::{enumerations, records};
use crate::verbs::{
    ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_gid, ibv_pd, ibv_qp, ibv_qp_type, ibv_srq,
};

enumerations! {
    ENUMERATIONS;

    /// `enum rdma_cm_event_type`
    enum rdma_cm_event_type: u32 {
        RDMA_CM_EVENT_ADDR_RESOLVED = 0,
        RDMA_CM_EVENT_ADDR_ERROR = 1,
        RDMA_CM_EVENT_ROUTE_RESOLVED = 2,
        RDMA_CM_EVENT_ROUTE_ERROR = 3,
        RDMA_CM_EVENT_CONNECT_REQUEST = 4,
        RDMA_CM_EVENT_CONNECT_RESPONSE = 5,
        RDMA_CM_EVENT_CONNECT_ERROR = 6,
        RDMA_CM_EVENT_UNREACHABLE = 7,
        RDMA_CM_EVENT_REJECTED = 8,
        RDMA_CM_EVENT_ESTABLISHED = 9,
        RDMA_CM_EVENT_DISCONNECTED = 10,
        RDMA_CM_EVENT_DEVICE_REMOVAL = 11,
        RDMA_CM_EVENT_MULTICAST_JOIN = 12,
        RDMA_CM_EVENT_MULTICAST_ERROR = 13,
        RDMA_CM_EVENT_ADDR_CHANGE = 14,
        RDMA_CM_EVENT_TIMEWAIT_EXIT = 15,
    }

    /// `enum rdma_port_space`
    enum rdma_port_space: u32 {
        RDMA_PS_IPOIB = 0x0002,
        RDMA_PS_TCP = 0x0106,
        RDMA_PS_UDP = 0x0111,
        RDMA_PS_IB = 0x013f,
    }
}

records! {
    RECORDS;

    /// `struct rdma_ib_addr`
    struct rdma_ib_addr {
        sgid: ibv_gid,
        dgid: ibv_gid,
        /// Big-endian.
        pkey: u16,
    }

    /// `struct rdma_addr`: both ends of a connection.
    struct rdma_addr {
        src_storage: sockaddr_storage,
        dst_storage: sockaddr_storage,
        ibaddr("addr.ibaddr"): rdma_ib_addr,
    }

    /// `struct rdma_route`
    struct rdma_route {
        addr: rdma_addr,
        path_rec: *mut c_void,
        num_paths: c_int,
    }

    /// `struct rdma_event_channel`: where events of identifiers arrive.
    struct rdma_event_channel {
        fd: c_int,
    }

    /// `struct rdma_cm_id`: a connection, or what listens for them.
    struct rdma_cm_id {
        verbs: *mut ibv_context,
        channel: *mut rdma_event_channel,
        context: *mut c_void,
        qp: *mut ibv_qp,
        route: rdma_route,
        ps: rdma_port_space,
        port_num: u8,
        event: *mut rdma_cm_event,
        send_cq_channel: *mut ibv_comp_channel,
        send_cq: *mut ibv_cq,
        recv_cq_channel: *mut ibv_comp_channel,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        pd: *mut ibv_pd,
        qp_type: ibv_qp_type,
    }

    /// `struct rdma_conn_param`: what a connection is asked for, or offered.
    struct rdma_conn_param {
        private_data: *const c_void,
        private_data_len: u8,
        responder_resources: u8,
        initiator_depth: u8,
        flow_control: u8,
        retry_count: u8,
        rnr_retry_count: u8,
        srq: u8,
        qp_num: u32,
    }

    /// `struct rdma_ud_param`
    struct rdma_ud_param {
        private_data: *const c_void,
        private_data_len: u8,
        ah_attr: ibv_ah_attr,
        qp_num: u32,
        qkey: u32,
    }

    /// What an event tells, by the kind of its identifier.
    union rdma_cm_event_param("typeof(((struct rdma_cm_event *)0)->param)") {
        conn: rdma_conn_param,
        ud: rdma_ud_param,
    }

    /// `struct rdma_cm_event`
    struct rdma_cm_event {
        id: *mut rdma_cm_id,
        listen_id: *mut rdma_cm_id,
        event: rdma_cm_event_type,
        status: c_int,
        param: rdma_cm_event_param,
    }
}
