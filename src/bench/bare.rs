//! The least a program needs to have an RDMA device do something: one queue pair through libibverbs, connected to itself.

use std::ffi::CStr;
use std::ptr::{NonNull, null_mut};
use std::time::{Duration, Instant};

use gdasync::gdsync::Device;
use gdasync::gdsync::memory::Memory;
use gdasync::gdsync::rdma::LinkLayer;
use gdasync::gdsync::verbs::Context;
use gdasync::measure::Samples;
use rdma_core_sys::Verbs;
use rdma_core_sys::verbs::{
    ibv_access_flags, ibv_ah_attr, ibv_context, ibv_cq, ibv_gid, ibv_mr, ibv_mtu, ibv_pd, ibv_poll_cq,
    ibv_post_send, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask as mask, ibv_qp_init_attr, ibv_qp_state,
    ibv_qp_type, ibv_send_flags, ibv_send_wr, ibv_send_wr_rdma, ibv_send_wr_wr, ibv_sge, ibv_wc,
    ibv_wc_status, ibv_wr_opcode,
};

use super::Result;
use super::proxy::WINDOW;

/// What libibverbs made, and the memory. Freed in the order of the fields below.
pub(super) struct Bare {
    verbs: &'static Verbs,
    context: NonNull<ibv_context>,
    pd: Option<NonNull<ibv_pd>>,
    mr: Option<NonNull<ibv_mr>>,
    cq: Option<NonNull<ibv_cq>>,
    qp: Option<NonNull<ibv_qp>>,
    memory: Memory,
    timeout: Duration,
}

impl Drop for Bare {
    fn drop(&mut self) {
        if let Some(qp) = self.qp {
            // SAFETY: made here, destroyed once, as is everything below, in the order that libibverbs asks for.
            unsafe { self.verbs.ibv_destroy_qp(qp.as_ptr()) };
        }
        if let Some(cq) = self.cq {
            // SAFETY: as above.
            unsafe { self.verbs.ibv_destroy_cq(cq.as_ptr()) };
        }
        if let Some(mr) = self.mr {
            // SAFETY: as above.
            unsafe { self.verbs.ibv_dereg_mr(mr.as_ptr()) };
        }
        if let Some(pd) = self.pd {
            // SAFETY: as above.
            unsafe { self.verbs.ibv_dealloc_pd(pd.as_ptr()) };
        }
        // SAFETY: as above.
        unsafe { self.verbs.ibv_close_device(self.context.as_ptr()) };
    }
}

fn last(call: &str) -> String {
    format!("{call}: {}", std::io::Error::last_os_error())
}

impl Bare {
    /// A queue pair on `device`, with the port and the GID of `like`.
    pub(super) fn new(device: &Device, like: &Context, timeout: Duration) -> Result<Self> {
        let verbs = Verbs::load()?;
        let context = open(verbs, device.name())?;
        let memory = Memory::alloc(64)?;
        let mut bare = Self { verbs, context, pd: None, mr: None, cq: None, qp: None, memory, timeout };
        // SAFETY: the device is open.
        let pd = NonNull::new(unsafe { verbs.ibv_alloc_pd(context.as_ptr()) });
        let pd = *bare.pd.insert(pd.ok_or_else(|| last("ibv_alloc_pd"))?);
        let access = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
        let addr = std::ptr::with_exposed_provenance_mut(usize::try_from(bare.memory.addr())?);
        // SAFETY: the memory lives as long as the region.
        let mr = NonNull::new(unsafe { verbs.reg_mr(pd.as_ptr(), addr, 64, access) });
        bare.mr = Some(mr.ok_or_else(|| last("ibv_reg_mr"))?);
        // SAFETY: the device is open.
        let cq =
            NonNull::new(unsafe { verbs.ibv_create_cq(context.as_ptr(), 512, null_mut(), null_mut(), 0) });
        let cq = *bare.cq.insert(cq.ok_or_else(|| last("ibv_create_cq"))?);
        let mut init = ibv_qp_init_attr::zeroed();
        (init.send_cq, init.recv_cq, init.qp_type) = (cq.as_ptr(), cq.as_ptr(), ibv_qp_type::IBV_QPT_RC);
        (init.cap.max_send_wr, init.cap.max_recv_wr) = (256, 16);
        (init.cap.max_send_sge, init.cap.max_recv_sge) = (1, 1);
        // SAFETY: domain and queue exist.
        let qp = NonNull::new(unsafe { verbs.ibv_create_qp(pd.as_ptr(), &raw mut init) });
        bare.qp = Some(qp.ok_or_else(|| last("ibv_create_qp"))?);
        bare.connect(device, like)?;
        Ok(bare)
    }

    fn connect(&self, device: &Device, like: &Context) -> Result<()> {
        let gid = like.gid();
        let mut ports = device.ports().iter().filter(|port| port.is_active());
        let found =
            ports.find_map(|port| Some((port, port.gids.iter().rev().find(|entry| entry.gid == gid)?)));
        let (port, entry) = found.ok_or("the port is gone")?;
        let qp = self.qp.ok_or("no queue pair")?;
        let mut attr = ibv_qp_attr::zeroed();
        attr.qp_state = ibv_qp_state::IBV_QPS_INIT;
        attr.port_num = port.number;
        attr.qp_access_flags = ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
        let init = mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS;
        self.modify(&mut attr, init)?;
        attr.qp_state = ibv_qp_state::IBV_QPS_RTR;
        attr.path_mtu = ibv_mtu::IBV_MTU_1024;
        // SAFETY: the queue pair exists.
        attr.dest_qp_num = unsafe { (*qp.as_ptr()).qp_num };
        attr.max_dest_rd_atomic = 1;
        attr.min_rnr_timer = 12;
        attr.ah_attr = ibv_ah_attr::zeroed();
        (attr.ah_attr.port_num, attr.ah_attr.dlid) = (port.number, port.lid);
        if port.link == LinkLayer::Ethernet {
            attr.ah_attr.is_global = 1;
            attr.ah_attr.grh.dgid = ibv_gid { raw: gid.0 };
            attr.ah_attr.grh.sgid_index = u8::try_from(entry.index)?;
            attr.ah_attr.grh.hop_limit = 64;
        }
        let rtr = mask::IBV_QP_AV | mask::IBV_QP_PATH_MTU | mask::IBV_QP_DEST_QPN | mask::IBV_QP_RQ_PSN;
        self.modify(&mut attr, rtr | mask::IBV_QP_MAX_DEST_RD_ATOMIC | mask::IBV_QP_MIN_RNR_TIMER)?;
        attr.qp_state = ibv_qp_state::IBV_QPS_RTS;
        (attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic) = (14, 6, 6, 1);
        let rts =
            mask::IBV_QP_TIMEOUT | mask::IBV_QP_RETRY_CNT | mask::IBV_QP_RNR_RETRY | mask::IBV_QP_SQ_PSN;
        self.modify(&mut attr, rts | mask::IBV_QP_MAX_QP_RD_ATOMIC)
    }

    fn modify(&self, attr: &mut ibv_qp_attr, given: mask) -> Result<()> {
        let qp = self.qp.ok_or("no queue pair")?;
        // SAFETY: the queue pair exists.
        let errno = unsafe { self.verbs.ibv_modify_qp(qp.as_ptr(), attr, given | mask::IBV_QP_STATE) };
        if errno == 0 { Ok(()) } else { Err(std::io::Error::from_raw_os_error(errno).into()) }
    }

    fn write(&self, qp: NonNull<ibv_qp>, mr: NonNull<ibv_mr>) -> Result<()> {
        // SAFETY: the region exists.
        let lkey = unsafe { (*mr.as_ptr()).lkey };
        // SAFETY: as above.
        let rkey = unsafe { (*mr.as_ptr()).rkey };
        let addr = self.memory.addr();
        let mut sge = ibv_sge { addr, length: 8, lkey };
        let mut wr = ibv_send_wr {
            sg_list: &raw mut sge,
            num_sge: 1,
            opcode: ibv_wr_opcode::IBV_WR_RDMA_WRITE,
            send_flags: ibv_send_flags::IBV_SEND_SIGNALED,
            wr: ibv_send_wr_wr { rdma: ibv_send_wr_rdma { remote_addr: addr + 8, rkey } },
            ..ibv_send_wr::zeroed()
        };
        let mut bad = null_mut();
        // SAFETY: the queue pair exists, the request and its list live until the call is over.
        let errno = unsafe { ibv_post_send(qp.as_ptr(), &raw mut wr, &raw mut bad) };
        if errno == 0 { Ok(()) } else { Err(format!("ibv_post_send: error {errno}").into()) }
    }

    /// Takes completions until at most `left` of `under_way` are left.
    fn drain(&self, cq: NonNull<ibv_cq>, under_way: &mut u64, left: u64) -> Result<()> {
        let end = Instant::now() + self.timeout;
        let mut wc = ibv_wc::zeroed();
        loop {
            // SAFETY: the queue exists, and there is room for one.
            match unsafe { ibv_poll_cq(cq.as_ptr(), 1, &raw mut wc) } {
                1 if wc.status == ibv_wc_status::IBV_WC_SUCCESS => *under_way -= 1,
                0 if *under_way <= left => return Ok(()),
                0 if Instant::now() > end => return Err("no completion came".into()),
                0 => {}
                _ => return Err(format!("ibv_poll_cq: {:?}", wc.status).into()),
            }
        }
    }

    fn parts(&self) -> Result<(NonNull<ibv_qp>, NonNull<ibv_mr>, NonNull<ibv_cq>)> {
        let parts = self.qp.zip(self.mr).zip(self.cq).ok_or("not made")?;
        let ((qp, mr), cq) = parts;
        Ok((qp, mr, cq))
    }

    pub(super) fn one(&self, rounds: u64, samples: &mut Samples) -> Result<()> {
        let (qp, mr, cq) = self.parts()?;
        for _ in 0..rounds {
            let start = Instant::now();
            self.write(qp, mr)?;
            self.drain(cq, &mut 1, 0)?;
            samples.add(start.elapsed());
        }
        Ok(())
    }

    pub(super) fn many(&self, rounds: u64) -> Result<Duration> {
        let (qp, mr, cq) = self.parts()?;
        let start = Instant::now();
        let mut under_way = 0;
        for _ in 0..rounds {
            self.write(qp, mr)?;
            under_way += 1;
            self.drain(cq, &mut under_way, WINDOW - 1)?;
        }
        self.drain(cq, &mut under_way, 0)?;
        Ok(start.elapsed() / u32::try_from(rounds)?)
    }
}

fn open(verbs: &Verbs, name: &str) -> Result<NonNull<ibv_context>> {
    let mut count = 0;
    // SAFETY: a place for the answer.
    let list = unsafe { verbs.ibv_get_device_list(&raw mut count) };
    if list.is_null() {
        return Err(last("ibv_get_device_list").into());
    }
    let devices = (0..usize::try_from(count)?).map(|at| {
        let place = list.wrapping_add(at);
        // SAFETY: the list has so many entries.
        unsafe { *place }
    });
    let mut found = Err(format!("{name} is gone").into());
    for device in devices {
        // SAFETY: the device is listed.
        let text = unsafe { verbs.ibv_get_device_name(device) };
        // SAFETY: libibverbs returns terminated text.
        if unsafe { CStr::from_ptr(text) }.to_str() == Ok(name) {
            // SAFETY: the device is listed.
            let context = NonNull::new(unsafe { verbs.ibv_open_device(device) });
            found = context.ok_or_else(|| last("ibv_open_device").into());
        }
    }
    // SAFETY: the list from above, freed once.
    unsafe { verbs.ibv_free_device_list(list) };
    found
}
