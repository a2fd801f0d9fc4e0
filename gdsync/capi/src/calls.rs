//! The functions of `gdsync.h`.

use std::ffi::{c_char, c_int};
use std::mem::MaybeUninit;
use std::ptr;

use gdsync::cuda::RawStream;
use rdma_core_sys::verbs::{
    ibv_context, ibv_pd, ibv_qp_attr, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, ibv_wc,
};

use crate::abi::*;
use crate::batch::{List, Target, cond, take_sends, take_wait};
use crate::guard::{self, Error, Result, no_flags, non_null, run, status};
use crate::pairs::{self, cq, pair};
use crate::words::{self, check_flags};
use gdsync_capi_support::streams::{current_gpu, lent};

/// Requests of one list.
const MAX_LIST: usize = 1 << 16;

/// The requests of a list of the program.
///
/// # Safety
/// The list must be one, and stay as it is while the result is used.
unsafe fn list<'a, T>(first: *mut T, next: impl Fn(&T) -> *mut T) -> Result<Vec<&'a T>> {
    let mut all = Vec::new();
    let mut at = non_null("list of work requests", first)?.as_ptr();
    while !at.is_null() {
        if all.len() == MAX_LIST {
            return Err(Error::invalid("list of work requests", "endless", "at most 65536 requests"));
        }
        // SAFETY: the caller guarantees the list.
        let wr = unsafe { &*at };
        all.push(wr);
        at = next(wr);
    }
    Ok(all)
}

/// Tells the program which request failed.
///
/// # Safety
/// `bad` must be null or writable.
unsafe fn tell_bad<T>(bad: *mut *mut T, wr: *const T) {
    if !bad.is_null() {
        // SAFETY: the caller guarantees it.
        unsafe { bad.write(wr.cast_mut()) };
    }
}

/// Items of an array of the program.
///
/// # Safety
/// There must be so many.
unsafe fn items<'a, T>(what: &'static str, first: *const T, count: usize) -> Result<&'a [T]> {
    if count > MAX_LIST {
        return Err(Error::invalid(what, count, "at most 65536"));
    }
    if count == 0 {
        return Ok(&[]);
    }
    let first = non_null(what, first)?;
    // SAFETY: the caller guarantees the array.
    Ok(unsafe { std::slice::from_raw_parts(first.as_ptr(), count) })
}

fn count(number: c_int) -> Result<usize> {
    usize::try_from(number).map_err(|_| Error::invalid("count", number, "0 or more"))
}

/// `gds_query_param`
///
/// # Safety
/// `value` must be null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_query_param(param: c_int, value: *mut c_int) -> c_int {
    status("gds_query_param", || {
        let value = non_null("value", value)?;
        if param != 0 {
            return Err(Error::invalid("param", param, "GDS_PARAM_VERSION"));
        }
        // SAFETY: the caller guarantees it.
        unsafe { value.write(VERSION) };
        Ok(())
    })
}

/// `gds_create_qp`
///
/// # Safety
/// Domain and context must be null or open, until the queue pair is destroyed; `attr` null or readable and writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_create_qp(
    pd: *mut ibv_pd,
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr,
    gpu_id: c_int,
    flags: c_int,
) -> *mut gds_qp {
    let made = run("gds_create_qp", || {
        let (pd, context) = (non_null("pd", pd)?, non_null("context", context)?);
        // SAFETY: the caller guarantees it.
        let attr = unsafe { non_null("qp_init_attr", attr)?.as_mut() };
        // SAFETY: the caller guarantees context and domain.
        unsafe { pairs::create(pd, context, attr, gpu_id, flags) }
    });
    made.unwrap_or_else(|errno| {
        // SAFETY: always allowed.
        let place = unsafe { libc::__errno_location() };
        // SAFETY: the calling thread's own.
        unsafe { place.write(errno) };
        ptr::null_mut()
    })
}

/// `gds_destroy_qp`
///
/// # Safety
/// Context and domain must still be open if it is one of [`gds_create_qp`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_destroy_qp(qp: *mut gds_qp) -> c_int {
    status("gds_destroy_qp", || if qp.is_null() { Ok(()) } else { pairs::destroy(qp) })
}

/// `gds_modify_qp`
///
/// # Safety
/// `attr` must be null or readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_modify_qp(qp: *mut gds_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    status("gds_modify_qp", || {
        let pair = pair(qp)?;
        // SAFETY: the caller guarantees it.
        pair.modify(unsafe { non_null("attr", attr)?.as_ref() }, mask)
    })
}

/// `gds_post_send`
///
/// # Safety
/// The list must be null or as libibverbs asks; `bad` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_post_send(
    qp: *mut gds_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    status("gds_post_send", || {
        let pair = pair(qp)?;
        // SAFETY: the caller guarantees the list.
        let all = unsafe { list(wr, |wr| wr.next) }?;
        all.into_iter().try_for_each(|wr| {
            // SAFETY: the caller guarantees the place.
            pair.post_send(wr).inspect_err(|_| unsafe { tell_bad(bad, wr) })
        })
    })
}

/// `gds_post_recv`
///
/// # Safety
/// As [`gds_post_send`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_post_recv(
    qp: *mut gds_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    status("gds_post_recv", || {
        let pair = pair(qp)?;
        // SAFETY: the caller guarantees the list.
        let all = unsafe { list(wr, |wr| wr.next) }?;
        all.into_iter().try_for_each(|wr| {
            // SAFETY: the caller guarantees the place.
            pair.post_recv(wr).inspect_err(|_| unsafe { tell_bad(bad, wr) })
        })
    })
}

/// `gds_poll_cq`
///
/// # Safety
/// `wc` must be null or writable for `entries` completions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_poll_cq(at: *mut gds_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    let polled = run("gds_poll_cq", || {
        let (cq, entries) = (cq(at.addr())?, count(entries)?);
        if entries == 0 {
            return Ok(0);
        }
        let wc = non_null("wc", wc)?.as_ptr().cast::<MaybeUninit<ibv_wc>>();
        // SAFETY: the caller guarantees the array, which may be uninitialised.
        let count = cq.poll(unsafe { std::slice::from_raw_parts_mut(wc, entries) })?;
        Ok(c_int::try_from(count).unwrap_or(c_int::MAX))
    });
    polled.unwrap_or_else(|errno| -errno)
}

/// Prepares a list of sends.
///
/// # Safety
/// As [`gds_post_send`].
unsafe fn prepare(qp: *mut gds_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> Result<gds_request> {
    let pair = pair(qp)?;
    // SAFETY: the caller guarantees the list.
    let all = unsafe { list(wr, |wr| wr.next) }?;
    pair.prepare(&all).map_err(|(error, at)| {
        // SAFETY: the caller guarantees the place.
        unsafe { tell_bad(bad, all[at]) };
        error
    })
}

/// `gds_stream_queue_send`
///
/// # Safety
/// As [`gds_post_send`], and `stream` must be a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_stream_queue_send(
    stream: RawStream,
    qp: *mut gds_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    status("gds_stream_queue_send", || {
        let lent = lent(stream)?;
        // SAFETY: the caller guarantees it.
        let request = unsafe { prepare(qp, wr, bad) }?;
        let mut list = List::new(Target::Stream(&lent));
        list.sends(&request)?;
        // SAFETY: the caller guarantees the place.
        list.post().inspect_err(|_| unsafe { tell_bad(bad, wr) })
    })
}

/// `gds_prepare_send`
///
/// # Safety
/// As [`gds_post_send`]; `request` must be null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_prepare_send(
    qp: *mut gds_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
    request: *mut gds_request,
) -> c_int {
    status("gds_prepare_send", || {
        let place = non_null("request", request)?;
        // SAFETY: the caller guarantees it.
        let request = unsafe { prepare(qp, wr, bad) }?;
        // SAFETY: the caller guarantees it.
        unsafe { place.write(request) };
        Ok(())
    })
}

/// Posts requests to a stream.
///
/// # Safety
/// `requests` must be null or so many requests; `stream` must be a live stream.
unsafe fn post_all(
    stream: RawStream,
    number: c_int,
    requests: *const gds_request,
    add: impl Fn(&mut List<'_>, &gds_request) -> Result<()>,
) -> Result<()> {
    // SAFETY: the caller guarantees it.
    let requests = unsafe { items("requests", requests, count(number)?) }?;
    let lent = lent(stream)?;
    let mut list = List::new(Target::Stream(&lent));
    requests.iter().try_for_each(|request| add(&mut list, request))?;
    list.post()
}

/// `gds_stream_post_send`
///
/// # Safety
/// `request` must be null or readable; `stream` must be a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_stream_post_send(stream: RawStream, request: *mut gds_request) -> c_int {
    // SAFETY: the caller guarantees it.
    status("gds_stream_post_send", || unsafe {
        post_all(stream, 1, request, |list, request| list.sends(request))
    })
}

/// `gds_stream_post_send_all`
///
/// # Safety
/// `requests` must be null or so many requests; `stream` must be a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_stream_post_send_all(
    stream: RawStream,
    count: c_int,
    requests: *mut gds_request,
) -> c_int {
    // SAFETY: the caller guarantees it.
    status("gds_stream_post_send_all", || unsafe {
        post_all(stream, count, requests, |list, request| list.sends(request))
    })
}

/// `gds_prepare_wait_cq`
///
/// # Safety
/// `request` must be null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_prepare_wait_cq(
    at: *mut gds_cq,
    request: *mut gds_request,
    flags: c_int,
) -> c_int {
    status("gds_prepare_wait_cq", || {
        no_flags(flags)?;
        let place = non_null("request", request)?;
        let request = cq(at.addr())?.prepare()?;
        // SAFETY: the caller guarantees it.
        unsafe { place.write(request) };
        Ok(())
    })
}

/// `gds_stream_post_wait_cq`
///
/// # Safety
/// As [`gds_stream_post_send`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_stream_post_wait_cq(stream: RawStream, request: *mut gds_request) -> c_int {
    // SAFETY: the caller guarantees it.
    status("gds_stream_post_wait_cq", || unsafe {
        post_all(stream, 1, request, |list, request| list.wait(request))
    })
}

/// `gds_stream_post_wait_cq_all`
///
/// # Safety
/// As [`gds_stream_post_send_all`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_stream_post_wait_cq_all(
    stream: RawStream,
    count: c_int,
    requests: *mut gds_request,
) -> c_int {
    // SAFETY: the caller guarantees it.
    status("gds_stream_post_wait_cq_all", || unsafe {
        post_all(stream, count, requests, |list, request| list.wait(request))
    })
}

/// `gds_stream_wait_cq`
///
/// # Safety
/// `stream` must be a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_stream_wait_cq(stream: RawStream, at: *mut gds_cq, flags: c_int) -> c_int {
    status("gds_stream_wait_cq", || {
        no_flags(flags)?;
        let cq = cq(at.addr())?;
        let lent = lent(stream)?;
        cq.wait(|wait| {
            let mut batch = gdsync::stream::Batch::new();
            batch.post_wait(wait);
            lent.stream.with_timeout(guard::wait_limit()).submit(&mut batch)
        })
    })
}

/// `gds_post_wait_cq`
///
/// # Safety
/// `request` must be null or readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_post_wait_cq(at: *mut gds_cq, request: *mut gds_request, flags: c_int) -> c_int {
    status("gds_post_wait_cq", || {
        no_flags(flags)?;
        cq(at.addr())?;
        // SAFETY: the caller guarantees it.
        let request = unsafe { non_null("request", request)?.read() };
        take_wait(&request, Some(at.addr())).map(drop)
    })
}

/// `gds_prepare_wait_value32`
///
/// # Safety
/// `desc` must be null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_prepare_wait_value32(
    desc: *mut gds_wait_value32,
    ptr: *mut u32,
    value: u32,
    cond_flags: u32,
    flags: c_int,
) -> c_int {
    status("gds_prepare_wait_value32", || {
        check_flags(flags, WAIT_POST_FLUSH)?;
        cond(cond_flags)?;
        non_null("ptr", ptr)?;
        // SAFETY: the caller guarantees it.
        unsafe { non_null("desc", desc)?.write(gds_wait_value32 { ptr, value, cond_flags, flags }) };
        Ok(())
    })
}

/// `gds_prepare_write_value32`
///
/// # Safety
/// `desc` must be null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_prepare_write_value32(
    desc: *mut gds_write_value32,
    ptr: *mut u32,
    value: u32,
    flags: c_int,
) -> c_int {
    status("gds_prepare_write_value32", || {
        check_flags(flags, WRITE_PRE_BARRIER)?;
        non_null("ptr", ptr)?;
        // SAFETY: the caller guarantees it.
        unsafe { non_null("desc", desc)?.write(gds_write_value32 { ptr, value, flags }) };
        Ok(())
    })
}

/// `gds_prepare_write_memory`
///
/// # Safety
/// `desc` must be null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_prepare_write_memory(
    desc: *mut gds_write_memory,
    dest: *mut u8,
    src: *const u8,
    count: usize,
    flags: c_int,
) -> c_int {
    status("gds_prepare_write_memory", || {
        check_flags(flags, WRITE_MEMORY_PRE_BARRIER | WRITE_MEMORY_POST_BARRIER)?;
        non_null("dest", dest)?;
        non_null("src", src)?;
        // SAFETY: the caller guarantees it.
        unsafe { non_null("desc", desc)?.write(gds_write_memory { dest, src, count, flags }) };
        Ok(())
    })
}

/// Posts descriptors.
///
/// # Safety
/// `descs` must be null or so many descriptors, each as its tag says.
unsafe fn post_descriptors(target: Target<'_>, number: usize, descs: *const gds_descriptor) -> Result<()> {
    // SAFETY: the caller guarantees it.
    let descs = unsafe { items("descriptors", descs, number) }?;
    let mut list = List::new(target);
    // SAFETY: the caller guarantees them.
    descs.iter().try_for_each(|desc| unsafe { list.add(desc) })?;
    list.post()
}

/// `gds_stream_post_descriptors`
///
/// # Safety
/// `descs` must be null or so many descriptors, each as its tag says; words must stay until the stream has passed;
/// `stream` must be a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_stream_post_descriptors(
    stream: RawStream,
    number: usize,
    descs: *mut gds_descriptor,
    flags: c_int,
) -> c_int {
    status("gds_stream_post_descriptors", || {
        no_flags(flags)?;
        let lent = lent(stream)?;
        // SAFETY: the caller guarantees it.
        unsafe { post_descriptors(Target::Stream(&lent), number, descs) }
    })
}

/// `gds_post_descriptors`
///
/// # Safety
/// `descs` must be null or so many descriptors, each as its tag says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_post_descriptors(
    number: usize,
    descs: *mut gds_descriptor,
    flags: c_int,
) -> c_int {
    status("gds_post_descriptors", || {
        no_flags(flags)?;
        // SAFETY: the caller guarantees it.
        unsafe { post_descriptors(Target::Cpu, number, descs) }
    })
}

/// `gds_alloc_mapped_memory`
///
/// # Safety
/// `desc` must be null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_alloc_mapped_memory(
    desc: *mut gds_mem_desc,
    size: usize,
    flags: c_int,
) -> c_int {
    status("gds_alloc_mapped_memory", || {
        let desc = non_null("desc", desc)?;
        if size > 0 {
            // SAFETY: the caller guarantees it.
            unsafe { desc.write(words::alloc(size, flags)?) };
        }
        Ok(())
    })
}

/// `gds_free_mapped_memory`
///
/// # Safety
/// `desc` must be null or readable and writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_free_mapped_memory(desc: *mut gds_mem_desc) -> c_int {
    status("gds_free_mapped_memory", || {
        // SAFETY: the caller guarantees it.
        let desc = unsafe { non_null("desc", desc)?.as_mut() };
        words::free(desc.d_ptr)?;
        (desc.d_ptr, desc.h_ptr, desc.bar_ptr, desc.mh) = (0, ptr::null_mut(), ptr::null_mut(), 0);
        Ok(())
    })
}

/// `gds_mlx5_get_dword_wait_info`
///
/// # Safety
/// `info` must be null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_mlx5_get_dword_wait_info(
    ptr: *mut u32,
    value: u32,
    flags: c_int,
    info: *mut gds_mlx5_dword_wait_info,
) -> c_int {
    status("gds_mlx5_get_dword_wait_info", || {
        let info = non_null("mlx5_info", info)?;
        check_flags(flags, 0)?;
        let gpu = current_gpu()?;
        let word = words::word(Some(&gpu), ptr.expose_provenance(), flags)?;
        let ptr = word.memory().gpu_addr(&gpu)?;
        // SAFETY: the caller guarantees it.
        unsafe { info.write(gds_mlx5_dword_wait_info { ptr, value }) };
        Ok(())
    })
}

/// `gds_mlx5_get_send_info`
///
/// # Safety
/// `requests` must be null or so many requests, `infos` null or writable for as many.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_mlx5_get_send_info(
    number: c_int,
    requests: *const gds_request,
    infos: *mut gds_mlx5_send_info,
) -> c_int {
    status("gds_mlx5_get_send_info", || {
        // SAFETY: the caller guarantees it.
        let requests = unsafe { items("requests", requests, count(number)?) }?;
        let infos = non_null("mlx5_infos", infos)?;
        for (at, request) in requests.iter().enumerate() {
            let (pair, _, sends) = take_sends(request)?;
            let words = pair.words(sends)?;
            let info = gds_mlx5_send_info {
                membar: 1,
                dbrec_ptr: words.record,
                dbrec_value: words.record_value,
                db_ptr: words.doorbell,
                db_value: words.doorbell_value,
            };
            // SAFETY: the caller guarantees the array.
            let place = unsafe { infos.add(at) };
            // SAFETY: inside the array, which the caller guarantees to be writable.
            unsafe { place.write(info) };
        }
        Ok(())
    })
}

/// `gds_mlx5_get_wait_info`
///
/// # Safety
/// As [`gds_mlx5_get_send_info`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gds_mlx5_get_wait_info(
    number: c_int,
    requests: *const gds_request,
    infos: *mut gds_mlx5_wait_info,
) -> c_int {
    status("gds_mlx5_get_wait_info", || {
        // SAFETY: the caller guarantees it.
        let requests = unsafe { items("requests", requests, count(number)?) }?;
        let infos = non_null("mlx5_infos", infos)?;
        for (at, request) in requests.iter().enumerate() {
            let (cq, _, wait) = take_wait(request, None)?;
            let claim = wait.completion();
            let words = wait.words(cq.gpu()).inspect_err(|_| cq.unclaim(&claim))?;
            let info = gds_mlx5_wait_info {
                cond: match words.cond {
                    gdsync::stream::Cond::Geq => 0,
                    gdsync::stream::Cond::Eq => 1,
                    gdsync::stream::Cond::And => 2,
                    gdsync::stream::Cond::Nor => 3,
                },
                cqe_ptr: words.word,
                cqe_value: words.value,
                flag_ptr: words.index,
                flag_value: words.index_value,
            };
            // SAFETY: the caller guarantees the array.
            let place = unsafe { infos.add(at) };
            // SAFETY: inside the array, which the caller guarantees to be writable.
            unsafe { place.write(info) };
        }
        Ok(())
    })
}

/// `gdsx_last_error`: the text stays until the next failure of the calling thread.
#[unsafe(no_mangle)]
pub extern "C" fn gdsx_last_error() -> *const c_char {
    guard::last_error()
}

/// `gdsx_set_wait_limit`
#[unsafe(no_mangle)]
pub extern "C" fn gdsx_set_wait_limit(milliseconds: u64) -> c_int {
    guard::set_wait_limit(milliseconds);
    0
}
