//! Channels: messages on streams that are repeated.

use std::ffi::c_int;
use std::sync::Arc;

use gdsync_capi_support::handles::{Guard, Table};
use mp::{Channel, Piece, Request};
use parking_lot::Mutex;

use crate::abi::{KINDS, Raw, gda_buf};
use crate::comm::{Comm, comm};
use crate::guard::{Result, end, invalid, place, rank, status, timeout, values};
use crate::memory::kept;
use crate::stream::on;

/// A channel, and its last send.
#[derive(Debug)]
struct Chan {
    comm: Arc<Comm>,
    channel: Channel,
    sent: Mutex<Option<Request>>,
}

static CHANNELS: Table<Chan> = Table::new(9, &KINDS);

fn channel(raw: Raw) -> Result<Guard<Chan>> {
    let chan = CHANNELS.get(raw)?;
    chan.comm.check()?;
    Ok(chan)
}

/// See the header.
///
/// # Safety
/// `places` must be null or valid for `n` buffers, `chan` null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_chan_create(
    of: Raw,
    with: c_int,
    places: *const gda_buf,
    n: c_int,
    timeout_ns: i64,
    chan: *mut Raw,
) -> c_int {
    status("gda_chan_create", || {
        let (chan, comm) = (place("chan", chan)?, comm(of)?.clone());
        comm.check()?;
        // SAFETY: the caller vouches for the buffers.
        let places = unsafe { values("places", places, n) }?;
        // SAFETY: one of them.
        let places = places.iter().map(|place| unsafe { kept(place) }).collect::<Result<Vec<_>>>()?;
        let places: Vec<Piece<'_>> = places.iter().map(|(memory, range)| (memory, range.clone())).collect();
        let wanted = if with == -1 { None } else { Some((rank(with)?, &places[..])) };
        let made = comm.comm.channels(wanted.as_slice(), timeout(timeout_ns)?)?.pop();
        *chan = match made {
            Some(channel) => CHANNELS.insert(Chan { comm, channel, sent: Mutex::default() })?,
            None => 0,
        };
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_chan_post(chan: Raw, stream: Raw) -> c_int {
    status("gda_chan_post", || {
        let chan = channel(chan)?;
        on(stream, |batch| Ok(chan.channel.post_recv_in_batch(batch)?))
    })
}

/// See the header.
///
/// # Safety
/// `buf` must be null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_chan_send(chan: Raw, buf: *const gda_buf, stream: Raw) -> c_int {
    status("gda_chan_send", || {
        let chan = channel(chan)?;
        // SAFETY: the caller vouches for the buffer.
        let (buffer, range) = unsafe { kept(buf) }?;
        let sent = on(stream, |batch| Ok(chan.channel.isend_in_batch(batch, &buffer, range)?))?;
        *chan.sent.lock() = Some(sent);
        Ok(())
    })
}

const SENT: c_int = 0;
const RECV: c_int = 1;

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_chan_wait(chan: Raw, what: c_int, stream: Raw) -> c_int {
    status("gda_chan_wait", || {
        let chan = channel(chan)?;
        match what {
            SENT => {
                let sent = chan.sent.lock().clone();
                let sent = sent.ok_or_else(|| invalid("the last send", "none", "one by gda_chan_send"))?;
                on(stream, |batch| Ok(chan.comm.comm.wait_in_batch(batch, &sent)?))
            }
            RECV => on(stream, |batch| Ok(chan.channel.wait_recv_in_batch(batch).map(drop)?)),
            _ => Err(invalid("what", what, "GDA_CHAN_SENT or GDA_CHAN_RECV")),
        }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_chan_destroy(chan: Raw) -> c_int {
    end("gda_chan_destroy", &CHANNELS, chan)
}
