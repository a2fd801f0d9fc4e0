//! The objects of libfabric that an endpoint consists of, opened and closed together.

use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr;

use super::survey::{Info, error_text, refused};
use gdsync_device::error::Result;
use rdma_core_sys::fabric as fi;
use smallvec::SmallVec;

/// Longest name of an endpoint.
pub(super) const MAX_NAME: usize = 128;
/// Entries of the queue for events.
const EVENTS: usize = 64;

/// Objects of libfabric. All calls are serialised by the lock of the endpoint.
#[derive(Debug)]
pub(super) struct Objects {
    info: Info,
    fabric: *mut fi::fid_fabric,
    domain: *mut fi::fid_domain,
    eq: *mut fi::fid_eq,
    av: *mut fi::fid_av,
    cq: *mut fi::fid_cq,
    ep: *mut fi::fid_ep,
    regions: Vec<*mut fi::fid_mr>,
    fd: Option<RawFd>,
}

// SAFETY: the objects may be used by any thread, one at a time (FI_THREAD_DOMAIN), and the pointers are only here.
unsafe impl Send for Objects {}

/// An entry of the completion queue.
#[derive(Debug)]
pub(super) struct Completion {
    /// The context of the request.
    pub(super) context: *mut c_void,
    /// Bytes received, or what the library says of the failure.
    pub(super) result: std::result::Result<usize, String>,
}

/// Few, mostly.
pub(super) type Completions = SmallVec<[Completion; 8]>;

impl Objects {
    /// Opens an endpoint for messages. It may have `requests` requests at once.
    ///
    /// # Errors
    /// [`Error::Device`](gdsync_device::Error::Device) names the call that failed.
    pub(super) fn open(info: Info, name: &str, requests: usize) -> Result<Self> {
        let null = ptr::null_mut;
        let mut o = Self {
            info,
            fabric: ptr::null_mut(),
            domain: ptr::null_mut(),
            eq: ptr::null_mut(),
            av: ptr::null_mut(),
            cq: ptr::null_mut(),
            ep: ptr::null_mut(),
            regions: Vec::new(),
            fd: None,
        };
        let (table, info) = (o.info.table(), o.info.as_ptr());
        let check = |call: &str, code: c_int| match code {
            0 => Ok(()),
            _ => {
                let what = error_text(table, code);
                Err(refused(name, format!("{call}: {what}; FI_LOG_LEVEL=warn has libfabric say more")))
            }
        };
        // SAFETY: the attributes are the library's; the place is valid for writing.
        check("fi_fabric", unsafe { table.fi_fabric(o.info.fabric_attr(), &raw mut o.fabric, null()) })?;
        let mut attr =
            fi::fi_eq_attr { size: EVENTS, wait_obj: fi::FI_WAIT_NONE, ..fi::fi_eq_attr::zeroed() };
        // SAFETY: the fabric is open; attributes and place are local.
        check("fi_eq_open", unsafe { fi::fi_eq_open(o.fabric, &raw mut attr, &raw mut o.eq, null()) })?;
        // SAFETY: the fabric is open, and the info is one of its provider.
        check("fi_domain", unsafe { fi::fi_domain(o.fabric, info, &raw mut o.domain, null()) })?;
        let mut attr = fi::fi_av_attr { type_: fi::FI_AV_TABLE, ..fi::fi_av_attr::zeroed() };
        // SAFETY: the domain is open; attributes and place are local.
        check("fi_av_open", unsafe { fi::fi_av_open(o.domain, &raw mut attr, &raw mut o.av, null()) })?;
        // With a descriptor to sleep on, if the provider has one. Twice as long as known: newer libraries read on.
        for wait_obj in [fi::FI_WAIT_FD, fi::FI_WAIT_NONE] {
            let format = fi::FI_CQ_FORMAT_MSG;
            let attr = fi::fi_cq_attr { size: requests, format, wait_obj, ..fi::fi_cq_attr::zeroed() };
            let mut attrs = [attr, fi::fi_cq_attr::zeroed()];
            // SAFETY: the domain is open; attributes and place are local.
            let code = unsafe { fi::fi_cq_open(o.domain, attrs.as_mut_ptr(), &raw mut o.cq, null()) };
            if code == 0 {
                o.fd = if wait_obj == fi::FI_WAIT_FD { o.descriptor() } else { None };
                break;
            }
            if wait_obj == fi::FI_WAIT_NONE {
                check("fi_cq_open", code)?;
            }
        }
        // SAFETY: the domain is open, and the info is the one that it was opened with.
        check("fi_endpoint", unsafe { fi::fi_endpoint(o.domain, info, &raw mut o.ep, null()) })?;
        let both = fi::FI_TRANSMIT | fi::FI_RECV;
        // Without a queue for events, EFA's provider ends the process on an error that no completion can tell.
        for (call, object, flags) in [
            ("fi_ep_bind of the event queue", o.eq.cast(), 0),
            ("fi_ep_bind of the address vector", o.av.cast(), 0),
            ("fi_ep_bind of the completion queue", o.cq.cast(), both),
        ] {
            // SAFETY: both objects are open.
            check(call, unsafe { fi::fi_bind(o.ep.cast(), object, flags) })?;
        }
        // SAFETY: the endpoint is open.
        check("fi_enable", unsafe { fi::fi_control(o.ep.cast(), fi::FI_ENABLE, null()) })?;
        Ok(o)
    }

    /// The descriptor of the completion queue.
    fn descriptor(&self) -> Option<RawFd> {
        let mut fd: RawFd = -1;
        // SAFETY: the queue is open, and the command writes an integer.
        let code = unsafe { fi::fi_control(self.cq.cast(), fi::FI_GETWAIT, (&raw mut fd).cast()) };
        (code == 0 && fd >= 0).then_some(fd)
    }

    /// The descriptor that is readable when there may be completions, once [`Objects::may_sleep`].
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the queue keeps it open as long as it is, which is as long as `self`.
        self.fd.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Whether a thread may sleep on the descriptor: nothing waits in the queue.
    pub(super) fn may_sleep(&self) -> bool {
        let mut queue: *mut fi::fid = self.cq.cast();
        // SAFETY: fabric and queue are open, and it is a list of one object.
        unsafe { fi::fi_trywait(self.fabric, &raw mut queue, 1) == 0 }
    }

    /// The info of the endpoint.
    pub(super) fn info(&self) -> &Info {
        &self.info
    }

    /// The name of the endpoint, for its peers.
    pub(super) fn name(&self) -> Option<Vec<u8>> {
        let (mut name, mut len) = ([0_u8; MAX_NAME], MAX_NAME);
        // SAFETY: the endpoint is open; the library writes at most `len` bytes.
        let code = unsafe { fi::fi_getname(self.ep, name.as_mut_ptr().cast(), &raw mut len) };
        (code == 0).then(|| name.get(..len).map(<[u8]>::to_vec)).flatten()
    }

    /// The address of the endpoint with this name.
    ///
    /// # Errors
    /// What the library says.
    pub(super) fn insert(&self, name: &[u8; MAX_NAME]) -> std::result::Result<fi::fi_addr_t, String> {
        let mut address = fi::FI_ADDR_UNSPEC;
        // SAFETY: the vector is open; the name has the longest length that the library reads, terminated by zeros.
        let code = unsafe {
            fi::fi_av_insert(self.av, name.as_ptr().cast(), 1, &raw mut address, 0, ptr::null_mut())
        };
        if code == 1 {
            Ok(address)
        } else {
            Err(format!("fi_av_insert: {}", error_text(self.info.table(), code)))
        }
    }

    /// Forgets an address, to which nothing is on its way.
    pub(super) fn remove(&self, mut address: fi::fi_addr_t) {
        // SAFETY: the vector is open, and the address is one of it. A failure leaves it there.
        let _ = unsafe { fi::fi_av_remove(self.av, &raw mut address, 1, 0) };
    }

    /// Registers buffers where the provider asks for it. Returns their descriptor.
    ///
    /// # Errors
    /// What the library says.
    pub(super) fn register(
        &mut self,
        bytes: *mut u8,
        len: usize,
    ) -> std::result::Result<*mut c_void, String> {
        let mode = self.info.domain().mr_mode;
        if mode & fi::FI_MR_LOCAL == 0 {
            return Ok(ptr::null_mut());
        }
        let (access, key) = (fi::FI_SEND | fi::FI_RECV, self.regions.len() as u64);
        let mut region = ptr::null_mut();
        // SAFETY: the domain is open; the caller keeps the memory until the region is closed with `self`.
        let code = unsafe {
            fi::fi_mr_reg(self.domain, bytes.cast(), len, access, 0, key, 0, &raw mut region, ptr::null_mut())
        };
        let failed = |call: &str, code| {
            Err(format!("{call}: {}; raise ulimit -l", error_text(self.info.table(), code)))
        };
        if code != 0 {
            return failed("fi_mr_reg", code);
        }
        self.regions.push(region);
        if mode & fi::FI_MR_ENDPOINT != 0 {
            // SAFETY: both are open.
            let bound = unsafe { fi::fi_bind(region.cast(), self.ep.cast(), 0) };
            // SAFETY: the region is open.
            let enabled = unsafe { fi::fi_control(region.cast(), fi::FI_ENABLE, ptr::null_mut()) };
            if bound != 0 || enabled != 0 {
                return failed("fi_mr_bind and fi_mr_enable", if bound == 0 { enabled } else { bound });
            }
        }
        // SAFETY: the region is open.
        Ok(unsafe { (*region).mem_desc })
    }

    /// Has a message received into a buffer. Returns the library's code.
    ///
    /// # Safety
    /// The buffer and its context stay the library's until a completion has this context, or `self` is dropped.
    pub(super) unsafe fn receive(
        &self,
        at: *mut u8,
        len: usize,
        desc: *mut c_void,
        context: *mut c_void,
    ) -> isize {
        // SAFETY: the endpoint is open; the caller vouches for the buffer.
        unsafe { fi::fi_recv(self.ep, at.cast(), len, desc, fi::FI_ADDR_UNSPEC, context) }
    }

    /// Sends a buffer. Returns the library's code.
    ///
    /// # Safety
    /// As [`Objects::receive`], if the code is 0.
    pub(super) unsafe fn send(
        &self,
        (at, len): (*const u8, usize),
        desc: *mut c_void,
        to: fi::fi_addr_t,
        context: *mut c_void,
    ) -> isize {
        // SAFETY: the endpoint is open; the caller vouches for the buffer.
        unsafe { fi::fi_send(self.ep, at.cast(), len, desc, to, context) }
    }

    /// Sends bytes that the library copies. Returns its code.
    ///
    /// # Safety
    /// `at` is valid for reading `len` bytes, and these are at most the `inject_size` of the info.
    pub(super) unsafe fn inject(&self, (at, len): (*const u8, usize), to: fi::fi_addr_t) -> isize {
        // SAFETY: the endpoint is open; the caller vouches for the bytes.
        unsafe { fi::fi_inject(self.ep, at.cast(), len, to) }
    }

    /// Takes completions, and lets the library work. Returns whether there may be more. `waits`: for a millisecond at most. That clears
    /// the signal behind the descriptor, which [`Objects::may_sleep`] does not do in 1.17 and 1.18 for `tcp`.
    ///
    /// # Errors
    /// What the library says if the queue fails.
    pub(super) fn poll(&self, taken: &mut Completions, waits: bool) -> std::result::Result<bool, String> {
        const BATCH: usize = 32;
        let mut entries = [fi::fi_cq_msg_entry::zeroed(); BATCH];
        let to = entries.as_mut_ptr().cast();
        let count = if waits {
            // SAFETY: the queue is open, of this format, and writes at most `BATCH` entries; without a condition.
            unsafe { fi::fi_cq_sread(self.cq, to, BATCH, ptr::null(), 1) }
        } else {
            // SAFETY: as it is when it waits.
            unsafe { fi::fi_cq_read(self.cq, to, BATCH) }
        };
        if let Ok(count) = usize::try_from(count) {
            let done =
                |entry: &fi::fi_cq_msg_entry| Completion { context: entry.op_context, result: Ok(entry.len) };
            taken.extend(entries[..count.min(BATCH)].iter().map(done));
            return Ok(count == BATCH);
        }
        match -count {
            fi::FI_EAGAIN => Ok(false),
            fi::FI_EAVAIL => {
                // Twice as long as known: newer libraries write on.
                let mut entries = [fi::fi_cq_err_entry::zeroed(); 2];
                // SAFETY: the queue is open, and writes one entry.
                let count = unsafe { fi::fi_cq_readerr(self.cq, entries.as_mut_ptr(), 0) };
                let entry = &entries[0];
                if count == 1 {
                    let why = || {
                        let text = error_text(self.info.table(), entry.err);
                        format!("{text}, provider's number {}", entry.prov_errno)
                    };
                    // No message is as long as one that did not fit.
                    let result = if entry.err == fi::FI_ETRUNC { Ok(usize::MAX) } else { Err(why()) };
                    taken.push(Completion { context: entry.op_context, result });
                }
                Ok(count == 1)
            }
            // What ends a wait. The next read tells an error of the queue.
            _ if waits => Ok(false),
            code => Err(format!("fi_cq_read: {}", error_text(self.info.table(), code))),
        }
    }

    /// The error that the queue for events has, if any.
    pub(super) fn event_error(&self) -> Option<String> {
        let (mut event, mut data) = (0, [0_u64; 32]);
        let room = size_of_val(&data);
        // SAFETY: the queue is open, and writes at most `room` bytes.
        let count = unsafe { fi::fi_eq_read(self.eq, &raw mut event, data.as_mut_ptr().cast(), room, 0) };
        if count != -fi::FI_EAVAIL {
            return None;
        }
        let mut entries = [fi::fi_eq_err_entry::zeroed(); 2];
        // SAFETY: the queue is open, and writes one entry.
        let count = unsafe { fi::fi_eq_readerr(self.eq, entries.as_mut_ptr(), 0) };
        (count > 0).then(|| error_text(self.info.table(), entries[0].err))
    }
}

impl Drop for Objects {
    fn drop(&mut self) {
        let regions = self.regions.iter().map(|region| region.cast::<fi::fid>());
        let objects =
            [self.cq.cast(), self.av.cast(), self.eq.cast(), self.domain.cast(), self.fabric.cast()];
        for object in [self.ep.cast()].into_iter().chain(regions).chain(objects) {
            if !object.is_null() {
                // SAFETY: it is open, closed once, and what uses it is closed before.
                let code = unsafe { fi::fi_close(object) };
                if code != 0 {
                    tracing::warn!(error = error_text(self.info.table(), code), "libfabric: fi_close");
                }
            }
        }
    }
}
