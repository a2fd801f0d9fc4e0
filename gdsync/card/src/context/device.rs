//! Contexts, and what a device and its port report.

use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use rustix::io::Errno;

use super::ioctl::pages_per_uar;
use super::{Context, Events, Result};
use crate::abi::{
    ib_uverbs_async_event_desc, ib_uverbs_ex_query_device, ib_uverbs_ex_query_device_resp,
    ib_uverbs_get_context, ib_uverbs_get_context_resp, ib_uverbs_query_device_resp, ib_uverbs_query_port,
    ib_uverbs_query_port_resp, length, mlx5_ib_alloc_ucontext_req_v2, mlx5_ib_alloc_ucontext_resp,
};
use crate::address::Link;
use crate::command::Command;
use crate::events::EventPipe;
use crate::user::User;

/// Completion vectors.
pub(super) const VECTORS: u32 = 4;
pub(super) const MAX_CQE: u32 = (1 << 22) - 1;
pub(super) const MAX_QP_WR: u32 = 32768;
/// Bytes of a WQE.
pub(super) const MAX_SQ_DESC: u16 = 1024;
pub(super) const MAX_RQ_DESC: u16 = 512;
pub(super) const MAX_SGE: u32 = 30;
/// Of a receive queue: its longest WQE has 512 bytes.
pub(super) const MAX_RECV_SGE: u32 = 32;
pub(super) const MAX_SRQ_SGE: u32 = 31;
pub(super) const MAX_RD_ATOMIC: u8 = 16;
/// `enum ib_mtu`: 4096 bytes. On Ethernet, the network interface (the loopback) has room for larger packets.
pub(super) const MTU: u8 = 5;

/// Bytes of a request of libmlx5 that has them all, and of older ones.
const REQUESTS: std::ops::RangeInclusive<usize> = 8..=size_of::<mlx5_ib_alloc_ucontext_req_v2>();
/// `MLX5_IB_ALLOC_UCTX_DEVX`
const DEVX: u32 = 1;

impl Context {
    pub(super) fn get_context(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let _: ib_uverbs_get_context = command.request()?;
        command.check_response::<ib_uverbs_get_context_resp>()?;
        let driver: mlx5_ib_alloc_ucontext_req_v2 = command.driver_request::<ib_uverbs_get_context, _>();
        let len = command.driver_len::<ib_uverbs_get_context>();
        if self.async_events.get().is_some() || !REQUESTS.contains(&len) || driver.comp_mask != 0 {
            return Err(Errno::INVAL);
        }
        if driver.flags & DEVX != 0 && self.hca.modes.no_devx {
            return Err(Errno::OPNOTSUPP);
        }
        let (pipe, program) = EventPipe::new(size_of::<ib_uverbs_async_event_desc>())?;
        let async_fd = program.as_raw_fd().cast_unsigned();
        let response = ib_uverbs_get_context_resp { async_fd, num_comp_vectors: VECTORS };
        command.respond_both(
            user,
            &response,
            &mlx5_ib_alloc_ucontext_resp {
                qp_tab_size: 1 << 18,
                bf_reg_size: 512,
                tot_bfregs: 0,
                cache_line_size: 64,
                max_sq_desc_sz: MAX_SQ_DESC,
                max_rq_desc_sz: MAX_RQ_DESC,
                max_send_wqebb: MAX_QP_WR,
                max_recv_wr: MAX_QP_WR,
                max_srq_recv_wr: MAX_QP_WR - 1,
                num_ports: 1,
                response_length: length::<mlx5_ib_alloc_ucontext_resp>(),
                cqe_version: 1,
                // MLX5_USER_CMDS_SUPP_UHW_QUERY_DEVICE | MLX5_USER_CMDS_SUPP_UHW_CREATE_AH
                cmds_supp_uhw: 3,
                // MLX5_USER_INLINE_MODE_L2
                eth_min_inline: 2,
                log_uar_size: 12,
                num_uars_per_page: pages_per_uar(),
                ..Default::default()
            },
        )?;
        let pipe = Arc::new(pipe);
        self.async_events.set(pipe.clone()).map_err(|_| Errno::INVAL)?;
        if driver.flags & DEVX != 0 {
            self.devx.grant();
        }
        self.add_channel(Events::Asynchronous, pipe, program);
        Ok(())
    }

    /// What the device can do. Without what is not there: memory windows, XRC, send with invalidate, flow steering, other paths.
    fn attributes(&self) -> ib_uverbs_query_device_resp {
        // CHANGE_PHY_PORT, PORT_ACTIVE_EVENT, SYS_IMAGE_GUID and RC_RNR_NAK_GEN, which mlx5's driver always sets.
        const FLAGS: u32 = 1 << 5 | 1 << 10 | 1 << 11 | 1 << 12;
        let guid = u64::from_ne_bytes(self.hca.port.guid());
        ib_uverbs_query_device_resp {
            fw_ver: 28 << 32 | 39 << 16 | 1002,
            node_guid: guid,
            sys_image_guid: guid,
            max_mr_size: u64::MAX,
            page_size_cap: 0xffff_f000,
            vendor_id: 0x2c9,
            vendor_part_id: 4129,
            hw_ver: 0,
            max_qp: 16384,
            max_qp_wr: MAX_QP_WR,
            device_cap_flags: FLAGS,
            max_sge: MAX_SGE,
            max_sge_rd: MAX_SGE,
            max_cq: 1 << 20,
            max_cqe: MAX_CQE,
            max_mr: (1 << 24) - 1024,
            max_pd: 1 << 23,
            max_qp_rd_atom: MAX_RD_ATOMIC.into(),
            max_res_rd_atom: 1 << 18,
            max_qp_init_rd_atom: MAX_RD_ATOMIC.into(),
            // IB_ATOMIC_HCA or IB_ATOMIC_NONE
            atomic_cap: u32::from(!self.hca.modes.no_atomics),
            max_ah: i32::MAX.cast_unsigned(),
            max_srq: 1 << 23,
            max_srq_wr: MAX_QP_WR - 1,
            max_srq_sge: MAX_SRQ_SGE,
            max_pkeys: 128,
            local_ca_ack_delay: 16,
            phys_port_cnt: 1,
            ..Default::default()
        }
    }

    pub(super) fn query_device(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        command.respond(user, &self.attributes())
    }

    pub(super) fn query_device_extended(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_ex_query_device = command.request()?;
        if request.comp_mask != 0 || request.reserved != 0 {
            return Err(Errno::INVAL);
        }
        let base = self.attributes();
        let len = command.response_len().min(size_of::<ib_uverbs_ex_query_device_resp>());
        let response = ib_uverbs_ex_query_device_resp {
            base,
            response_length: u32::try_from(len).unwrap_or_default(),
            device_cap_flags_ex: base.device_cap_flags.into(),
            ..Default::default()
        };
        command.respond(user, &response)?;
        // mlx5_ib_query_device_resp, without any of what it lists: comp_mask, response_length, zeros.
        let room = command.driver_response_len::<ib_uverbs_ex_query_device_resp>();
        if room >= 8 {
            let mut zeros = vec![0u8; room];
            zeros[4..8].copy_from_slice(&u32::try_from(room).unwrap_or_default().to_ne_bytes());
            command.respond_driver_bytes::<ib_uverbs_ex_query_device_resp>(user, &zeros)?;
        }
        Ok(())
    }

    pub(super) fn query_port(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_query_port = command.request()?;
        if request.port_num != 1 {
            return Err(Errno::INVAL);
        }
        let port = self.hca.port;
        let is_ib = port.link == Link::InfiniBand;
        let response = ib_uverbs_query_port_resp {
            port_cap_flags: port.link.capabilities(),
            max_msg_sz: 1 << 30,
            gid_tbl_len: port.link.gids(),
            pkey_tbl_len: port.link.pkeys(),
            lid: port.lid(),
            sm_lid: u16::from(is_ib),
            // IB_PORT_ACTIVE
            state: 4,
            max_mtu: MTU,
            active_mtu: MTU,
            max_vl_num: 4,
            subnet_timeout: 18,
            // 2X of NDR
            active_width: 16,
            active_speed: 128,
            // IB_PORT_PHYS_STATE_LINK_UP
            phys_state: 5,
            link_layer: if is_ib { 1 } else { 2 },
            // IB_UVERBS_QPF_GRH_REQUIRED
            flags: u8::from(!is_ib),
            ..Default::default()
        };
        command.respond(user, &response)
    }
}
