//! What devices, ports and GID tables say of themselves, and addresses.

use std::ffi::{c_char, c_int};

use super::*;
use crate::abi::records;

records! {
    RECORDS;

    /// `union ibv_gid`: an address, in network byte order.
    union ibv_gid {
        raw: [u8; 16],
        global: ibv_gid_global,
    }

    /// The halves of a GID.
    struct ibv_gid_global("typeof(((union ibv_gid *)0)->global)") {
        /// Big-endian.
        subnet_prefix: u64,
        /// Big-endian.
        interface_id: u64,
    }

    /// `struct ibv_gid_entry`: one entry of a GID table.
    struct ibv_gid_entry {
        gid: ibv_gid,
        gid_index: u32,
        port_num: u32,
        gid_type: ibv_gid_type,
        /// Index of the network interface, 0 for none.
        ndev_ifindex: u32,
    }

    /// `struct ibv_device_attr`
    struct ibv_device_attr {
        fw_ver: [c_char; 64],
        /// Big-endian.
        node_guid: u64,
        /// Big-endian.
        sys_image_guid: u64,
        max_mr_size: u64,
        page_size_cap: u64,
        vendor_id: u32,
        vendor_part_id: u32,
        hw_ver: u32,
        max_qp: c_int,
        max_qp_wr: c_int,
        device_cap_flags: ibv_device_cap_flags,
        max_sge: c_int,
        max_sge_rd: c_int,
        max_cq: c_int,
        max_cqe: c_int,
        max_mr: c_int,
        max_pd: c_int,
        max_qp_rd_atom: c_int,
        max_ee_rd_atom: c_int,
        max_res_rd_atom: c_int,
        max_qp_init_rd_atom: c_int,
        max_ee_init_rd_atom: c_int,
        atomic_cap: ibv_atomic_cap,
        max_ee: c_int,
        max_rdd: c_int,
        max_mw: c_int,
        max_raw_ipv6_qp: c_int,
        max_raw_ethy_qp: c_int,
        max_mcast_grp: c_int,
        max_mcast_qp_attach: c_int,
        max_total_mcast_qp_attach: c_int,
        max_ah: c_int,
        max_fmr: c_int,
        max_map_per_fmr: c_int,
        max_srq: c_int,
        max_srq_wr: c_int,
        max_srq_sge: c_int,
        max_pkeys: u16,
        local_ca_ack_delay: u8,
        phys_port_cnt: u8,
    }

    /// `struct ibv_query_device_ex_input`
    struct ibv_query_device_ex_input {
        comp_mask: u32,
    }

    /// The transports in `struct ibv_odp_caps`.
    struct ibv_odp_per_transport_caps("typeof(((struct ibv_odp_caps *)0)->per_transport_caps)") {
        rc_odp_caps: ibv_odp_transport_cap_bits,
        uc_odp_caps: ibv_odp_transport_cap_bits,
        ud_odp_caps: ibv_odp_transport_cap_bits,
    }

    /// `struct ibv_odp_caps`
    struct ibv_odp_caps {
        general_caps: ibv_odp_general_caps,
        per_transport_caps: ibv_odp_per_transport_caps,
    }

    /// `struct ibv_tso_caps`
    struct ibv_tso_caps {
        max_tso: u32,
        supported_qpts: u32,
    }

    /// `struct ibv_rss_caps`
    struct ibv_rss_caps {
        supported_qpts: u32,
        max_rwq_indirection_tables: u32,
        max_rwq_indirection_table_size: u32,
        rx_hash_fields_mask: u64,
        rx_hash_function: u8,
    }

    /// `struct ibv_packet_pacing_caps`
    struct ibv_packet_pacing_caps {
        /// kbit/s
        qp_rate_limit_min: u32,
        /// kbit/s
        qp_rate_limit_max: u32,
        supported_qpts: u32,
    }

    /// `struct ibv_tm_caps`
    struct ibv_tm_caps {
        max_rndv_hdr_size: u32,
        max_num_tags: u32,
        flags: u32,
        max_ops: u32,
        max_sge: u32,
    }

    /// `struct ibv_cq_moderation_caps`
    struct ibv_cq_moderation_caps {
        max_cq_count: u16,
        /// Microseconds.
        max_cq_period: u16,
    }

    /// `struct ibv_pci_atomic_caps`
    struct ibv_pci_atomic_caps {
        fetch_add: ibv_pci_atomic_op_size,
        swap: ibv_pci_atomic_op_size,
        compare_swap: ibv_pci_atomic_op_size,
    }

    /// `struct ibv_device_attr_ex`: the library writes no more than the size that [`Verbs::query_device_ex`] passes.
    struct ibv_device_attr_ex grows {
        orig_attr: ibv_device_attr,
        comp_mask: u32,
        odp_caps: ibv_odp_caps,
        completion_timestamp_mask: u64,
        /// kHz
        hca_core_clock: u64,
        device_cap_flags_ex: u64,
        tso_caps: ibv_tso_caps,
        rss_caps: ibv_rss_caps,
        max_wq_type_rq: u32,
        packet_pacing_caps: ibv_packet_pacing_caps,
        raw_packet_caps: u32,
        tm_caps: ibv_tm_caps,
        cq_mod_caps: ibv_cq_moderation_caps,
        max_dm_size: u64,
        pci_atomic_caps: ibv_pci_atomic_caps,
        xrc_odp_caps: u32,
        phys_port_cnt_ex: u32,
    }

    /// `struct ibv_port_attr`: the library writes no more than the size that [`Verbs::query_port`] passes.
    struct ibv_port_attr grows {
        state: ibv_port_state,
        max_mtu: ibv_mtu,
        active_mtu: ibv_mtu,
        gid_tbl_len: c_int,
        port_cap_flags: ibv_port_cap_flags,
        max_msg_sz: u32,
        bad_pkey_cntr: u32,
        qkey_viol_cntr: u32,
        pkey_tbl_len: u16,
        lid: u16,
        sm_lid: u16,
        lmc: u8,
        max_vl_num: u8,
        sm_sl: u8,
        subnet_timeout: u8,
        init_type_reply: u8,
        /// 1, 2, 4, 8 and 16 for 1x, 4x, 8x, 12x and 2x.
        active_width: u8,
        /// 1 SDR, 2 DDR, 4 QDR, 8 FDR10, 16 FDR, 32 EDR, 64 HDR, 128 NDR.
        active_speed: u8,
        /// 3 disabled, 5 link up.
        phys_state: u8,
        link_layer: ibv_link_layer,
        flags: ibv_port_flags,
        port_cap_flags2: u16,
    }

    /// `struct ibv_global_route`: the network part of an address.
    struct ibv_global_route {
        dgid: ibv_gid,
        /// 20 bits.
        flow_label: u32,
        sgid_index: u8,
        hop_limit: u8,
        traffic_class: u8,
    }

    /// `struct ibv_ah_attr`: an address.
    struct ibv_ah_attr {
        grh: ibv_global_route,
        dlid: u16,
        sl: u8,
        src_path_bits: u8,
        /// A value of [`ibv_rate`].
        static_rate: u8,
        /// 1 where `grh` counts; always with Ethernet.
        is_global: u8,
        port_num: u8,
    }
}
