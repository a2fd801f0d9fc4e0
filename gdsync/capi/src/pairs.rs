//! Queue pairs of the program, the completions that it has not polled, and what it has prepared.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use gdsync::Device;
use gdsync::cuda::Gpu;
use gdsync::stream::{PreparedSend, PreparedWait, SendWords};
use gdsync::verbs::{Completion, OnGpu, Pd, Qp, RecvWr, SendWr, Wc};
use parking_lot::{Mutex, MutexGuard, RwLock};
use rdma_core_sys::verbs::{
    ibv_context, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type,
    ibv_recv_wr, ibv_send_wr, ibv_wc,
};

use crate::abi::{ON_GPU, WQ_ON_GPU, gds_cq, gds_qp, gds_request};
use crate::guard::{Error, LIBRARY, Result, wait_limit};
use crate::work::{completion, with_recv, with_send};
use gdsync_capi_support::{process, streams};

/// How long the end of a queue pair waits for streams, and for CUDA to forget the registers of the card.
const PATIENCE: Duration = Duration::from_secs(10);

/// A queue pair of the program.
#[derive(Debug)]
pub(crate) struct Pair {
    /// The program's structure.
    of: usize,
    pub(crate) qp: Qp,
    pub(crate) gpu: Gpu,
    domain: Arc<Pd>,
    /// Every send completes with success reported.
    signals_all: bool,
    is_datagram: bool,
    send: Side,
    recv: Side,
}

/// One queue of a [`Pair`].
#[derive(Debug)]
struct Side {
    /// The program's `gds_cq_t`.
    cq: usize,
    /// Requests that may be posted and not polled.
    room: usize,
    /// The submit lock: held from a claim until a stream has its wait, so that streams get waits in the order of their claims.
    submit: Mutex<()>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Requests posted, or prepared, and not polled, in order.
    pending: VecDeque<Pending>,
    /// Index after the last claimed one.
    claimed: usize,
    sends: HashMap<u64, Vec<PreparedSend>>,
    waits: HashMap<u64, PreparedWait>,
}

#[derive(Debug)]
struct Pending {
    completion: Completion,
    is_signalled: bool,
    /// A wait is for it.
    is_claimed: bool,
}

impl Pending {
    fn new(completion: Completion, is_signalled: bool) -> Self {
        Self { completion, is_signalled, is_claimed: false }
    }
}

/// What a handle of the program is.
#[derive(Clone, Debug)]
enum Handle {
    Qp(Arc<Pair>),
    SendCq(Arc<Pair>),
    RecvCq(Arc<Pair>),
}

/// The live handles by address. The structures themselves are never freed, so that no address is that of two.
static HANDLES: RwLock<Option<HashMap<usize, Handle>>> = RwLock::new(None);

/// Protection domains of the program, by context and domain, while queue pairs use them: so long the program keeps both, and nothing
/// else has their addresses.
static DOMAINS: Mutex<Vec<([usize; 2], Weak<Pd>)>> = Mutex::new(Vec::new());

/// A completion queue of the program: its pair, and whether it is that of sends.
#[derive(Clone, Debug)]
pub(crate) struct Cq(Arc<Pair>, bool);

fn handle(what: &'static str, at: usize) -> Result<Handle> {
    let found = HANDLES.read().as_ref().and_then(|handles| handles.get(&at).cloned());
    found.ok_or_else(|| {
        Error::invalid(what, format!("{at:#x}"), "one of a queue pair of gds_create_qp that lives")
    })
}

/// The queue pair of a `gds_qp_t`.
pub(crate) fn pair(at: *const gds_qp) -> Result<Arc<Pair>> {
    match handle("queue pair", at.addr())? {
        Handle::Qp(pair) => Ok(pair),
        _ => Err(Error::invalid("queue pair", format!("{at:p}"), "a gds_qp_t, not a gds_cq_t")),
    }
}

/// The queue of a `gds_cq_t`.
pub(crate) fn cq(at: usize) -> Result<Cq> {
    match handle("completion queue", at)? {
        Handle::SendCq(pair) => Ok(Cq(pair, true)),
        Handle::RecvCq(pair) => Ok(Cq(pair, false)),
        Handle::Qp(_) => {
            Err(Error::invalid("completion queue", format!("{at:#x}"), "a gds_cq_t, not a gds_qp_t"))
        }
    }
}

/// The number of a new request.
fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Creates a queue pair.
///
/// # Safety
/// Context and domain must be open, until the queue pair is destroyed.
pub(crate) unsafe fn create(
    pd: NonNull<ibv_pd>,
    context: NonNull<ibv_context>,
    attr: &mut ibv_qp_init_attr,
    gpu_id: c_int,
    flags: c_int,
) -> Result<*mut gds_qp> {
    if flags & !ON_GPU != 0 {
        let expected = "GDS_CREATE_QP_TX_CQ_ON_GPU, _RX_CQ_ON_GPU and _WQ_DBREC_ON_GPU";
        let name =
            if flags & !(ON_GPU | WQ_ON_GPU) == 0 { "GDS_CREATE_QP_WQ_ON_GPU" } else { "unknown flags" };
        return Err(Error::invalid("flags", format!("{flags:#x} ({name})"), expected));
    }
    match attr.qp_type {
        ibv_qp_type::IBV_QPT_RC | ibv_qp_type::IBV_QPT_UD if attr.srq.is_null() => {}
        other => {
            let expected = "IBV_QPT_RC or IBV_QPT_UD, without a shared receive queue";
            return Err(Error::invalid("qp_type", other.0, expected));
        }
    }
    let is_datagram = attr.qp_type == ibv_qp_type::IBV_QPT_UD;
    // SAFETY: the caller's domain is allocated.
    if unsafe { (*pd.as_ptr()).context } != context.as_ptr() {
        return Err(Error::invalid("protection domain", format!("{pd:p}"), "one of the context"));
    }
    if flags != 0 {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| {
            LIBRARY.announce(
                "gds_create_qp: GDS_CREATE_QP_*_ON_GPU: the queues are in host memory; libmlx5, which makes an ibv_qp, puts them there",
            );
        });
    }
    process::claim();
    let gpu = Gpu::open(gpu_id)?;
    // SAFETY: as the caller promises.
    let domain = unsafe { adopt(context, pd) }?;
    let size = |value: u32| usize::try_from(value.max(1)).unwrap_or(usize::MAX);
    let cap = attr.cap;
    let builder = domain.build_qp().max_send_wr(size(cap.max_send_wr)).max_recv_wr(size(cap.max_recv_wr));
    let builder = builder.max_send_sge(size(cap.max_send_sge)).max_recv_sge(cap.max_recv_sge.max(1));
    // The program sets the Q_Key by `gds_modify_qp`.
    let builder = if is_datagram { builder.datagrams(0) } else { builder };
    let qp = builder.max_inline(size(cap.max_inline_data)).on_gpu(&gpu, OnGpu::empty()).build()?;
    let raw = qp.raw().ok_or_else(|| Error::invalid("queue pair", "in GPU memory", "one of libibverbs"))?;
    // SAFETY: the queue pair was just created, and nobody changes it.
    let &ibv_qp { send_cq, recv_cq, .. } = unsafe { raw.as_ref() };
    (attr.send_cq, attr.recv_cq) = (send_cq, recv_cq);
    // Never freed: see `HANDLES`.
    let [send, recv] =
        [send_cq, recv_cq].map(|cq| ptr::from_mut(Box::leak(Box::new(gds_cq { cq, curr_offset: 0 }))));
    let of = gds_qp { qp: raw.as_ptr(), send_cq: send, recv_cq: recv, dev_context: context.as_ptr() };
    let of = ptr::from_mut(Box::leak(Box::new(of)));
    let side = |cq: *mut gds_cq, room: u32| Side {
        cq: cq.expose_provenance(),
        room: size(room).next_power_of_two(),
        submit: Mutex::default(),
        state: Mutex::default(),
    };
    let pair = Arc::new(Pair {
        of: of.addr(),
        qp,
        gpu,
        domain,
        signals_all: attr.sq_sig_all != 0,
        is_datagram,
        send: side(send, cap.max_send_wr),
        recv: side(recv, cap.max_recv_wr),
    });
    publish(pair);
    Ok(of)
}

/// Lets the program use a queue pair by its handles.
fn publish(pair: Arc<Pair>) {
    let mut handles = HANDLES.write();
    let handles = handles.get_or_insert_default();
    handles.insert(pair.send.cq, Handle::SendCq(pair.clone()));
    handles.insert(pair.recv.cq, Handle::RecvCq(pair.clone()));
    handles.insert(pair.of, Handle::Qp(pair));
}

/// Destroys a queue pair.
pub(crate) fn destroy(at: *const gds_qp) -> Result<()> {
    let pair = pair(at)?;
    {
        let mut handles = HANDLES.write();
        let handles = handles.get_or_insert_default();
        // Of two threads one gets here first.
        handles
            .remove(&pair.of)
            .ok_or_else(|| Error::invalid("queue pair", format!("{at:p}"), "one that lives"))?;
        handles.remove(&pair.send.cq);
        handles.remove(&pair.recv.cq);
    }
    // Ends the waits of other threads for its completions.
    pair.qp.stop(&Error::GivenUp);
    let (start, patience) = (Instant::now(), PATIENCE.min(wait_limit()));
    let mut shared = pair;
    // Other threads may be in calls with it.
    let Pair { qp, gpu, domain, send, recv, .. } = loop {
        match Arc::try_unwrap(shared) {
            Ok(pair) => break pair,
            Err(used) if start.elapsed() > patience => {
                // The program may call again, and must not free the domain before.
                let (queue, qpn) = ("send and receive", used.qp.qpn());
                publish(used);
                let owner = "a call of another thread; let it end, and destroy the queue pair again".into();
                return Err(Error::Busy { queue, qpn, owner });
            }
            Err(other) => shared = other,
        }
        std::thread::yield_now();
    };
    drop((send, recv));
    streams::forget(&qp);
    let ended = qp.destroy(PATIENCE);
    let Some(pd) = Arc::into_inner(domain) else { return ended };
    // The program may free the domain and close the device now: nothing of them may be in use any more, and CUDA must not know
    // the registers.
    ended.and(pd.close(PATIENCE))?;
    if let Err(error) = gpu.reclaim(PATIENCE) {
        tracing::warn!(%error, "CUDA still knows the doorbell registers of a device that may be closed");
    }
    Ok(())
}

/// The device of a protection domain of the program, which its queue pairs share.
///
/// # Safety
/// As [`create`].
unsafe fn adopt(context: NonNull<ibv_context>, pd: NonNull<ibv_pd>) -> Result<Arc<Pd>> {
    let key = [context.as_ptr().addr(), pd.as_ptr().addr()];
    let find = |domains: &[(_, Weak<Pd>)]| domains.iter().find(|(at, _)| *at == key)?.1.upgrade();
    if let Some(known) = find(&DOMAINS.lock()) {
        return Ok(known);
    }
    // Without the lock: the card's self-test takes a while.
    // SAFETY: as the caller promises; it ends with the last queue pair.
    let own = Arc::new(unsafe { Device::adopt(context, pd) }?);
    let mut domains = DOMAINS.lock();
    domains.retain(|(_, pd)| pd.strong_count() > 0);
    if let Some(first) = find(&domains) {
        // Another thread was faster. `own` is dropped after the lock.
        return Ok(first);
    }
    domains.push((key, Arc::downgrade(&own)));
    Ok(own)
}

impl Side {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl Pair {
    /// Changes attributes as `ibv_modify_qp`.
    pub(crate) fn modify(&self, attr: &ibv_qp_attr, mask: c_int) -> Result<()> {
        let mask = ibv_qp_attr_mask::from_bits_retain(u32::from_ne_bytes(mask.to_ne_bytes()));
        let resets =
            mask.contains(ibv_qp_attr_mask::IBV_QP_STATE) && attr.qp_state == ibv_qp_state::IBV_QPS_RESET;
        let (mut sends, mut receives) = (self.send.lock(), self.recv.lock());
        self.qp.modify_raw(attr, mask)?;
        if resets {
            (*sends, *receives) = Default::default();
        }
        Ok(())
    }

    /// Refuses a request for which a full queue has no room.
    fn check_room(&self, state: &State, is_send: bool) -> Result<()> {
        let (queue, side) = if is_send { ("send queue", &self.send) } else { ("receive queue", &self.recv) };
        if state.pending.len() < side.room {
            return Ok(());
        }
        let (outstanding, depth) = (state.pending.len() as u64, side.room as u64);
        Err(Error::QueueFull { queue, qpn: self.qp.qpn(), outstanding, depth, untaken: 0 })
    }

    fn is_signalled(&self, wr: &ibv_send_wr) -> bool {
        self.signals_all || crate::work::is_signalled(wr)
    }

    /// Posts a send by the CPU.
    pub(crate) fn post_send(&self, wr: &ibv_send_wr) -> Result<()> {
        let mut state = self.send.lock();
        self.check_room(&state, true)?;
        let post = |send: &SendWr<'_>| self.qp.post_send(std::slice::from_ref(send));
        let completion = with_send(wr, self.is_datagram, post)?;
        state.pending.push_back(Pending::new(completion, self.is_signalled(wr)));
        Ok(())
    }

    /// Posts a receive.
    pub(crate) fn post_recv(&self, wr: &ibv_recv_wr) -> Result<()> {
        let mut state = self.recv.lock();
        self.check_room(&state, false)?;
        let post = |receive: &RecvWr<'_>| self.qp.post_recv(std::slice::from_ref(receive));
        let completion = with_recv(wr, post)?;
        state.pending.push_back(Pending::new(completion, true));
        Ok(())
    }

    /// Prepares a list of sends, all or none. On an error also returns the send that failed.
    pub(crate) fn prepare(&self, wrs: &[&ibv_send_wr]) -> std::result::Result<gds_request, (Error, usize)> {
        let mut state = self.send.lock();
        let mut prepared = Vec::with_capacity(wrs.len());
        for (at, wr) in wrs.iter().enumerate() {
            let one = self.check_room(&state, true).and_then(|()| {
                let prepare = |send: &SendWr<'_>| self.qp.prepare_send(std::slice::from_ref(send));
                with_send(wr, self.is_datagram, prepare)
            });
            match one {
                Ok(send) => {
                    state.pending.push_back(Pending::new(send.completion(), self.is_signalled(wr)));
                    prepared.push(send);
                }
                Err(error) => {
                    let before = state.pending.len() - prepared.len();
                    state.pending.truncate(before);
                    // From the back: each is taken back whole.
                    while prepared.pop().is_some() {}
                    return Err((error, at));
                }
            }
        }
        let id = next_id();
        state.sends.insert(id, prepared);
        Ok(gds_request::new(self.of, id))
    }

    /// Takes prepared sends, to post them.
    pub(crate) fn take_sends(&self, id: u64) -> Result<Vec<PreparedSend>> {
        self.send.lock().sends.remove(&id).ok_or_else(|| posted("send"))
    }

    /// Gives prepared sends back that were not posted.
    pub(crate) fn put_sends(&self, id: u64, sends: Vec<PreparedSend>) {
        self.send.lock().sends.insert(id, sends);
    }

    /// Hands sends to a kernel. Returns the words of the last one; what is refused is taken back.
    pub(crate) fn words(&self, sends: Vec<PreparedSend>) -> Result<SendWords> {
        // From here on nobody prepares sends, which could get the numbers of those taken back.
        let mut state = self.send.lock();
        let mut words = Err(Error::invalid("request", "empty", "one of gds_prepare_send"));
        let mut left: VecDeque<_> = sends.into();
        while let Some(send) = left.pop_front() {
            let refused = send.completion();
            words = send.words(&self.gpu);
            if words.is_err() {
                state.forget(&refused);
                // From the back: each is taken back whole.
                while let Some(send) = left.pop_back() {
                    state.forget(&send.completion());
                }
            }
        }
        words
    }

    /// Forgets sends of a refused submission, before they are taken back: then others get their numbers.
    pub(crate) fn forget(&self, sends: &[Completion]) {
        let mut state = self.send.lock();
        sends.iter().for_each(|send| state.forget(send));
    }
}

impl State {
    fn forget(&mut self, send: &Completion) {
        let is_it = |pending: &Pending| pending.completion.index() == send.index();
        if let Some(at) = self.pending.iter().rposition(is_it) {
            self.pending.remove(at);
            self.claimed -= usize::from(at < self.claimed);
        }
    }
}

fn posted(what: &str) -> Error {
    Error::invalid(
        "request",
        format!("a {what} that was posted, or never prepared"),
        "one that was prepared and not posted",
    )
}

impl Cq {
    fn side(&self) -> &Side {
        if self.1 { &self.0.send } else { &self.0.recv }
    }

    pub(crate) fn gpu(&self) -> &Gpu {
        &self.0.gpu
    }

    /// Claims the next signalled completion.
    fn claim(&self, state: &mut State) -> Result<PreparedWait> {
        let next = (state.claimed..state.pending.len()).find(|&at| state.pending[at].is_signalled);
        let queue = if self.1 { "send" } else { "receive" };
        let at = next.ok_or(Error::NothingToWaitFor { queue, qpn: self.0.qp.qpn() })?;
        let wait = self.0.qp.prepare_wait(&state.pending[at].completion)?;
        state.pending[at].is_claimed = true;
        state.claimed = at + 1;
        self.count(1);
        Ok(wait)
    }

    /// Adds to `curr_offset`, which programs may look at.
    fn count(&self, claims: u32) {
        let cq = ptr::with_exposed_provenance_mut::<gds_cq>(self.side().cq);
        // SAFETY: the structure is never freed, and written only here, under the lock of the side.
        let offset = unsafe { &raw mut (*cq).curr_offset };
        // SAFETY: the structure is never freed, and the lock of the side is held.
        let before = unsafe { offset.read() };
        // SAFETY: the structure is never freed, and the lock of the side is held.
        unsafe { offset.write(before.wrapping_add(claims)) };
    }

    /// Prepares a wait for the next signalled completion.
    pub(crate) fn prepare(&self) -> Result<gds_request> {
        let mut state = self.side().lock();
        let wait = self.claim(&mut state)?;
        let id = next_id();
        state.waits.insert(id, wait);
        Ok(gds_request::new(self.side().cq, id))
    }

    /// Has `submit` take a wait for the next signalled completion; on an error it is as if nothing was claimed.
    pub(crate) fn wait(&self, submit: impl FnOnce(PreparedWait) -> Result<()>) -> Result<()> {
        let _submit = self.side().submit.lock();
        // `submit` may wait for the stream, whose callbacks may need the state.
        let wait = self.claim(&mut self.side().lock())?;
        let claim = wait.completion();
        submit(wait).inspect_err(|_| self.unclaim(&claim))
    }

    /// Undoes the claim of a wait that no stream has.
    pub(crate) fn unclaim(&self, claim: &Completion) {
        let state = &mut *self.side().lock();
        self.count(u32::MAX);
        let is_it = |pending: &&mut Pending| pending.completion.index() == claim.index();
        let Some(pending) = state.pending.iter_mut().find(is_it) else { return };
        pending.is_claimed = false;
        // A completion before a later claim cannot be claimed again, as in the queue itself.
        while state.claimed > 0 && !state.pending[state.claimed - 1].is_claimed {
            state.claimed -= 1;
        }
    }

    /// Takes a prepared wait, to post it or to give the completion back.
    pub(crate) fn take_wait(&self, id: u64) -> Result<PreparedWait> {
        self.side().lock().waits.remove(&id).ok_or_else(|| posted("wait"))
    }

    /// Gives a prepared wait back that was not posted.
    pub(crate) fn put_wait(&self, id: u64, wait: PreparedWait) {
        self.side().lock().waits.insert(id, wait);
    }

    /// Takes completions in order into `out`. Returns their number.
    pub(crate) fn poll(&self, out: &mut [std::mem::MaybeUninit<ibv_wc>]) -> Result<usize> {
        let mut state = self.side().lock();
        let mut count = 0;
        while count < out.len() {
            let Some(front) = state.pending.front() else { break };
            let taken: Option<Option<Wc>> = match front.completion.take() {
                Ok(None) => break,
                Ok(Some(wc)) => Some(Some(wc).filter(|wc| front.is_signalled || wc.syndrome.is_some())),
                Err(Error::Reset { .. }) => Some(None),
                Err(_) if count > 0 => break,
                Err(error) => return Err(error),
            };
            let sender = self.0.is_datagram.then(|| front.completion.sender().ok().flatten()).flatten();
            state.pending.pop_front();
            state.claimed = state.claimed.saturating_sub(1);
            if let Some(Some(wc)) = taken {
                if let Err(error) = wc.ok() {
                    LIBRARY.report("gds_poll_cq", error, false);
                }
                out[count].write(completion(&wc, sender));
                count += 1;
            }
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forked_children_are_refused_though_a_thread_held_a_lock() {
        process::claim();
        let held = HANDLES.write();
        // SAFETY: the child makes one call, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // A call that waits for the lock is ended.
            // SAFETY: no conditions.
            unsafe { libc::alarm(60) };
            // SAFETY: no queue pair.
            let refused =
                unsafe { crate::gds_post_send(ptr::dangling_mut(), ptr::null_mut(), ptr::null_mut()) };
            // SAFETY: no conditions.
            unsafe { libc::_exit(refused) };
        }
        drop(held);
        let mut status = 0;
        // SAFETY: a place for the answer.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, libc::EACCES));
    }
}
