//! Where each rank can be found when rank 0, through which all talk otherwise, is gone.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use super::Bootstrap;
use super::frame::Kind;
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// A listening socket of each rank. Nobody is let in before the ranks have to find each other again; until then the system
/// answers, which shows that the process is there.
#[derive(Debug)]
pub(super) struct Doors {
    pub(super) own: TcpListener,
    /// Of all ranks, as this one reaches them.
    pub(super) all: Vec<SocketAddr>,
}

/// In place of an address: that of rank 0's host, as whoever reads it reaches that.
const WITH_ROOT: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

impl Bootstrap {
    /// Opens a door of each rank; all must call it. A job of one rank needs none.
    ///
    /// # Errors
    /// As [`Bootstrap::allgather`]; [`Error::Bootstrap`] for a rank whose host gives it no port.
    pub(crate) fn open_doors(&mut self, timeout: Duration) -> Result<()> {
        let deadline = Deadline::after(timeout);
        let Some(root) = self.peers.first() else { return Ok(()) };
        let is_root = self.rank == 0;
        let fix = "check the network of this host";
        let failed = |error| Error::bootstrap_os("its socket", "cannot be asked for its address", error, fix);
        // For rank 0 the way to anybody is as good as another.
        let (here, there) = root.addresses().map_err(failed)?;
        let is_local = self.peers.iter().all(|conn| {
            conn.addresses().is_ok_and(|(here, there)| here.is_loopback() && there.is_loopback())
        });
        let locals = self.exchange(Kind::Init, &[u8::from(is_local)], deadline.remaining())?;
        let is_one_host = locals.iter().all(|local| local[..] == [1]);
        let door = open(is_one_host.then_some(here)).and_then(|door| Ok((door.local_addr()?.port(), door)));
        let address = door.as_ref().map(|(port, _)| {
            let ip = if is_root || here.is_loopback() && !is_one_host { WITH_ROOT } else { here };
            SocketAddr::from((ip, *port)).to_string()
        });
        let addresses =
            self.exchange(Kind::Init, address.unwrap_or_default().as_bytes(), deadline.remaining())?;
        let (_, own) = door.map_err(|error| {
            Error::bootstrap_os(
                "this rank",
                "cannot listen",
                error,
                "raise the limit on open files (ulimit -n)",
            )
        })?;
        let root = if is_root { Ipv4Addr::LOCALHOST.into() } else { there };
        let all = addresses.iter().enumerate().map(|(rank, text)| {
            let address = std::str::from_utf8(text).ok().and_then(|text| text.parse::<SocketAddr>().ok());
            let address = address.ok_or_else(|| {
                let what = "does not say where it can be found";
                Error::bootstrap(format!("rank {rank}"), what, "see the error of that rank")
            })?;
            Ok(if address.ip() == WITH_ROOT { SocketAddr::new(root, address.port()) } else { address })
        });
        self.doors = Some(Arc::new(Doors { own, all: all.collect::<Result<_>>()? }));
        Ok(())
    }
}

/// At this address, or at all of this host.
fn open(at: Option<IpAddr>) -> std::io::Result<TcpListener> {
    let door = match at {
        Some(ip) => TcpListener::bind((ip, 0)),
        None => {
            let any = [SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)), (Ipv4Addr::UNSPECIFIED, 0).into()];
            TcpListener::bind(&any[..])
        }
    }?;
    door.set_nonblocking(true)?;
    Ok(door)
}
