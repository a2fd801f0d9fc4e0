//! How the surviving ranks find each other again, without rank 0.
//!
//! Each rank has a listening socket of its own. The lowest surviving rank leads. Each rank dials those below it, from rank 0 on: the
//! socket of a dead process refuses. To the first that answers it sends a hello, and waits for the list of survivors; if that
//! rank dies meanwhile, it tries the next one. A rank that finds nobody below it leads: it dials those above it, and waits until
//! each has sent its hello or is dead. So no live rank is left out, and no dead one is waited for.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::sleep;
use std::time::Duration;

use super::bootstrap::{Bootstrap, refuse_closed};
use super::connection::{
    Conn, FIX_FILES, FIX_NETWORK, Failure, Job, Kind, MAX_PAYLOAD, Step, announce, connect, drive,
    send_to_all, wait,
};
use super::rendezvous::{Listeners, bind_any};
use crate::error::{Error, Result};
use crate::exchange::CommonCall;
use crate::wait::Deadline;

/// Longest wait for one answer to a connection request.
const DIAL: Duration = Duration::from_secs(1);

/// How often the leader checks the others, and a rank dials one that does not answer.
const TICK: Duration = Duration::from_millis(20);

const FIX_LATE: &str = "let all surviving ranks call it; give up those that hang";

/// Dials the listening socket of a process; `None` where it refuses, as the process is dead. Another error leaves that open.
fn dial(address: SocketAddr, deadline: &Deadline) -> io::Result<Option<TcpStream>> {
    match connect(address, DIAL, deadline) {
        Err(error) if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset) => {
            Ok(None)
        }
        other => other.map(Some),
    }
}

/// A rank above the leader.
enum Member {
    /// Without a hello. The connection, if there is one, breaks when its process dies.
    Awaited(Option<TcpStream>),
    Joined(Conn),
    Gone,
}

/// The ranks of a job that find each other again.
struct Group {
    rank: u32,
    job: Job,
    listeners: Arc<Listeners>,
    /// Ranks that are left out.
    without: Vec<usize>,
    is_closed: Arc<AtomicBool>,
}

/// In place of an address: that of the host of rank 0, as the reader reaches it.
const WITH_ROOT: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

impl Bootstrap {
    /// Opens the listening sockets of all ranks, which must all call it. A job of one rank needs none.
    ///
    /// # Errors
    /// [`Error::Deadline`] names a late rank; [`Error::Bootstrap`] one that is gone, or whose host gives it no port.
    pub(super) fn open_listeners(&mut self, timeout: Duration) -> Result<()> {
        let deadline = Deadline::after(timeout);
        let Some(root) = self.peers.first() else { return Ok(()) };
        let is_root = self.rank == 0;
        let failed =
            |error| Error::bootstrap_os("its socket", "cannot be asked for its address", error, FIX_NETWORK);
        // For rank 0 any peer will do.
        let (here, there) = root.addresses().map_err(failed)?;
        let is_local = self.peers.iter().all(|conn| {
            conn.addresses().is_ok_and(|(here, there)| here.is_loopback() && there.is_loopback())
        });
        let locals = self.exchange(CommonCall::Init, &[u8::from(is_local)], deadline.remaining())?;
        let is_one_host = locals.iter().all(|local| local[..] == [1]);
        let listener = match is_one_host {
            true => TcpListener::bind((own_loopback(here), 0)),
            false => bind_any(0),
        };
        let listener = listener.and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok((listener.local_addr()?, listener))
        });
        let address = listener.as_ref().map(|(address, _)| {
            let ip = match is_one_host {
                true => address.ip(),
                false if is_root || here.is_loopback() => WITH_ROOT,
                false => here,
            };
            SocketAddr::from((ip, address.port())).to_string()
        });
        let addresses =
            self.exchange(CommonCall::Init, address.unwrap_or_default().as_bytes(), deadline.remaining())?;
        let (_, own) =
            listener.map_err(|error| Error::bootstrap_os("this rank", "cannot listen", error, FIX_FILES))?;
        let root = if is_root { Ipv4Addr::LOCALHOST.into() } else { there };
        let all = addresses.iter().enumerate().map(|(rank, text)| {
            let address = std::str::from_utf8(text).ok().and_then(|text| text.parse::<SocketAddr>().ok());
            let address = address.ok_or_else(|| {
                let what = "does not tell its address";
                Error::bootstrap(format!("rank {rank}"), what, "see the error of that rank")
            })?;
            Ok(if address.ip() == WITH_ROOT { SocketAddr::new(root, address.port()) } else { address })
        });
        self.listeners = Some(Arc::new(Listeners { own, all: all.collect::<Result<_>>()? }));
        Ok(())
    }
}

/// A loopback address at which hardly any other process listens: the port of a dead rank may be taken by somebody else, who must not
/// be taken for the rank.
fn own_loopback(address: IpAddr) -> IpAddr {
    match getrandom::u32() {
        Ok(random) if address.is_ipv4() => {
            let [_, b, c, d] = random.to_be_bytes();
            Ipv4Addr::new(127, b, c, d.clamp(1, 254)).into()
        }
        _ => address,
    }
}

impl Bootstrap {
    /// Connects the surviving ranks, except those in `without`, and returns their former ranks. All survivors must call it, and may
    /// again after a failure.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] for a rank that the others leave out, or without [`Bootstrap::open_listeners`];
    /// [`Error::Deadline`] names ranks that are alive, and late.
    pub(super) fn regroup(&mut self, without: &[usize], timeout: Duration) -> Result<(Self, Vec<usize>)> {
        let deadline = Deadline::after(timeout);
        self.leave();
        let Some(listeners) = self.listeners.clone() else {
            if self.job.size == 1 {
                return Ok((Self::new(0, self.job, Vec::new()), vec![0]));
            }
            let what = "was not connected by Communicator::init, and cannot find the others again";
            return Err(Error::bootstrap("this rank", what, "restart the job"));
        };
        let (job, is_closed) = (self.job, self.is_closed.clone());
        let mut group = Group { rank: self.rank, job, listeners, without: without.to_vec(), is_closed };
        loop {
            let (mut next, ranks) = group.meet(&deadline)?;
            next.is_closed = self.is_closed.clone();
            match next.open_listeners(deadline.remaining()) {
                Ok(()) => {
                    next.is_closed = Arc::default();
                    return Ok((next, ranks));
                }
                // Another one has died: the others see that as well, and try again.
                Err(Error::Bootstrap { .. }) if !deadline.is_over() => sleep(TICK),
                Err(error) => return Err(error),
            }
        }
    }

    /// Ends this exchange, so that no rank waits in it for this one.
    fn leave(&mut self) {
        if self.failed.is_none() {
            let what = "it has left to shrink the communicator, as all surviving ranks have to";
            let error = Error::bootstrap(format!("rank {}", self.rank), what, "call Communicator::shrink");
            announce(&mut self.peers, &self.job, &Failure { rank: self.rank, error });
        }
        let fix = "use the communicator that Communicator::shrink returns";
        self.failed =
            Some(Error::bootstrap("this communicator", "has ended: this rank left it to shrink", fix));
    }
}

impl Group {
    fn meet(&mut self, deadline: &Deadline) -> Result<(Bootstrap, Vec<usize>)> {
        for leader in 0..self.rank {
            if self.without.contains(&(leader as usize)) {
                continue;
            }
            if let Some(found) = self.follow(leader, deadline)? {
                return Ok(found);
            }
        }
        self.lead(deadline)
    }

    fn bootstrap(&self, rank: usize, ranks: &[usize], mut peers: Vec<Conn>) -> Bootstrap {
        peers.iter_mut().for_each(|conn| conn.max_payload = MAX_PAYLOAD);
        let count = |n| u32::try_from(n).expect("not more than the ranks before");
        let job = Job { size: count(ranks.len()), token: self.job.token };
        let mut bootstrap = Bootstrap::new(count(rank), job, peers);
        bootstrap._former = Some(self.listeners.clone());
        bootstrap
    }

    /// Sends a hello to `leader`, and waits for the list of survivors; `None` when it is dead.
    fn follow(&self, leader: u32, deadline: &Deadline) -> Result<Option<(Bootstrap, Vec<usize>)>> {
        let address = self.listeners.all[leader as usize];
        let peer = format!("rank {leader} ({address})");
        let stream = loop {
            refuse_closed(&self.is_closed)?;
            match dial(address, deadline) {
                Ok(Some(stream)) => break stream,
                Ok(None) => return Ok(None),
                Err(error) if deadline.is_over() => {
                    let what = "could not be reached, and may be alive";
                    return Err(Error::bootstrap_os(peer, what, error, FIX_LATE));
                }
                Err(_) => sleep(TICK),
            }
        };
        let Ok(mut conn) = Conn::new(stream, peer) else { return Ok(None) };
        conn.max_payload = MAX_PAYLOAD;
        let without: Vec<u8> = self.without.iter().flat_map(|&rank| (rank as u64).to_be_bytes()).collect();
        conn.send(self.job.frame(Kind::Hello, self.rank, &without));
        let mut answer = None;
        let what = "shrink (it answers when all surviving ranks have called it)";
        let driven = drive(slice::from_mut(&mut conn), leader, what, deadline, |_, conn| {
            refuse_closed(&self.is_closed)?;
            // An error of the connection means that the leader is dead.
            let arrived = conn.flush().and_then(|left| conn.fill().map(|whole| (left, whole)));
            let Ok((left, whole)) = arrived else { return Ok(Step { done: true, events: 0 }) };
            if whole {
                answer = conn.take_any().ok();
                return Ok(Step { done: true, events: 0 });
            }
            Ok(Step { done: false, events: libc::POLLIN | if left { 0 } else { libc::POLLOUT } })
        });
        driven.map_err(|failure| failure.error)?;
        let Some(answer) = answer else { return Ok(None) };
        if answer.header.kind != Kind::Welcome {
            return Err(Error::bootstrap(conn.peer, answer.text(), FIX_LATE));
        }
        let ranks = ranks(&answer.payload);
        let own = ranks.iter().position(|&rank| rank == self.rank as usize);
        let own = own.filter(|&own| own > 0).ok_or_else(|| conn.fault("has left this rank out"))?;
        conn.peer = format!("rank 0 (before: rank {leader})");
        Ok(Some((self.bootstrap(own, &ranks, vec![conn]), ranks)))
    }

    fn lead(&mut self, deadline: &Deadline) -> Result<(Bootstrap, Vec<usize>)> {
        let mut members: Vec<Member> = (0..self.job.size)
            .map(|rank| if rank > self.rank { Member::Awaited(None) } else { Member::Gone })
            .collect();
        let mut pending = Vec::new();
        loop {
            refuse_closed(&self.is_closed)?;
            while let Ok((stream, address)) = self.listeners.own.accept() {
                pending.extend(Conn::new(stream, address.to_string()).map(|mut conn| {
                    // The ranks to leave out, at most all.
                    conn.max_payload = 8 * members.len();
                    conn
                }));
            }
            pending = self.read_hellos(pending, &mut members);
            let late = self.check_members(&mut members, deadline);
            if late.is_empty() {
                break;
            }
            if deadline.is_over() {
                let name = |rank: &u32| format!("rank {rank} at {}", self.listeners.all[*rank as usize]);
                let names: Vec<_> = late.iter().map(name).collect();
                let error = deadline.error(format!("shrink: waiting for {}", names.join(", ")), FIX_LATE);
                let frame = self.job.frame(Kind::Failed, late[0], error.to_string().as_bytes());
                for member in &mut members {
                    if let Member::Joined(conn) = member {
                        conn.farewell(frame.clone());
                    }
                }
                return Err(error);
            }
            let here = members.iter().filter_map(|member| match member {
                Member::Joined(conn) => Some(conn.fd()),
                Member::Awaited(Some(stream)) => Some(stream.as_raw_fd()),
                _ => None,
            });
            let fds = std::iter::once(self.listeners.own.as_raw_fd())
                .chain(pending.iter().map(Conn::fd))
                .chain(here);
            let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            wait(&mut fds.map(poll).collect::<Vec<_>>(), deadline.remaining().min(TICK))?;
        }
        let mut survivors = vec![self.rank as usize];
        let mut peers = Vec::new();
        for (rank, member) in members.into_iter().enumerate() {
            if let Member::Joined(mut conn) = member {
                conn.peer = format!("rank {} (before: rank {rank})", survivors.len());
                survivors.push(rank);
                peers.push(conn);
            }
        }
        let list: Vec<u8> = survivors.iter().flat_map(|&rank| (rank as u64).to_be_bytes()).collect();
        let welcome = self.job.frame(Kind::Welcome, self.rank, &list);
        // The first exchange notices a rank that dies now.
        if let Err(Failure { error: error @ Error::Deadline { .. }, .. }) =
            send_to_all(&mut peers, &welcome, "shrink", deadline)
        {
            return Err(error);
        }
        Ok((self.bootstrap(0, &survivors, peers), survivors))
    }

    /// Admits the connections that have sent a hello; returns the others.
    fn read_hellos(&mut self, pending: Vec<Conn>, members: &mut [Member]) -> Vec<Conn> {
        let mut silent = Vec::new();
        for mut conn in pending {
            match conn.fill() {
                Ok(false) => silent.push(conn),
                Ok(true) => self.admit(conn, members),
                // A rank that gave up, or checked whether this one is alive.
                Err(_) => {}
            }
        }
        silent
    }

    fn admit(&mut self, mut conn: Conn, members: &mut [Member]) {
        let Ok(hello) = conn.take_any() else { return };
        let (rank, header) = (hello.header.rank as usize, hello.header);
        let fits =
            header.kind == Kind::Hello && (header.token, header.size) == (self.job.token, self.job.size);
        if !fits || rank <= self.rank as usize || rank >= members.len() {
            return conn.farewell(self.job.frame(Kind::Refused, self.rank, b"it is no rank of this job"));
        }
        self.without.extend(ranks(&hello.payload).into_iter().filter(|&other| other != self.rank as usize));
        // Replaces a connection that it has closed since, if there was one.
        members[rank] = Member::Joined(conn);
    }

    /// Checks the members that are awaited, or may have died since; returns those that are late.
    fn check_members(&self, members: &mut [Member], deadline: &Deadline) -> Vec<u32> {
        let mut late = Vec::new();
        for (member, rank) in members.iter_mut().zip(0..) {
            let is_out = self.without.contains(&(rank as usize));
            match member {
                Member::Joined(conn) if is_out => {
                    conn.farewell(self.job.frame(
                        Kind::Refused,
                        self.rank,
                        b"the other ranks gave this one up",
                    ));
                    *member = Member::Gone;
                }
                Member::Awaited(_) if is_out => *member = Member::Gone,
                _ => {}
            }
            // It gave up or died: its socket tells.
            if let Member::Joined(conn) = member
                && conn.expect_silence(Kind::Hello).is_err()
            {
                *member = Member::Awaited(None);
            }
            if let Member::Awaited(probe) = member {
                if probe.as_ref().is_some_and(is_broken) {
                    *probe = None;
                }
                if probe.is_none() {
                    match dial(self.listeners.all[rank as usize], deadline) {
                        Ok(Some(stream)) => *probe = stream.set_nonblocking(true).is_ok().then_some(stream),
                        Ok(None) => *member = Member::Gone,
                        Err(_) => {}
                    }
                }
            }
            if matches!(member, Member::Awaited(_)) {
                late.push(rank);
            }
        }
        late
    }
}

fn is_broken(stream: &TcpStream) -> bool {
    match stream.peek(&mut [0]) {
        Ok(count) => count == 0,
        Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    }
}

fn ranks(bytes: &[u8]) -> Vec<usize> {
    let (ranks, _) = bytes.as_chunks::<8>();
    ranks.iter().filter_map(|rank| usize::try_from(u64::from_be_bytes(*rank)).ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::launch::{Launch, Launcher, Root};

    const LONG: Duration = Duration::from_secs(60);

    /// Somebody else listens at the port of the dead rank, as another job might.
    #[test]
    fn ports_of_dead_ranks_may_be_taken() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let root = listener.local_addr().unwrap().to_string();
        let launch = |rank| Launch {
            rank,
            size: 3,
            local_rank: rank,
            local_size: Some(3),
            root: Root::At(root.clone()),
            token: 7,
            launcher: Launcher::Env,
        };
        thread::scope(|scope| {
            let joined = |rank| {
                let launch = launch(rank);
                scope.spawn(move || {
                    let mut bootstrap = Bootstrap::connect(&launch, LONG).unwrap();
                    bootstrap.open_listeners(LONG).unwrap();
                    bootstrap
                })
            };
            let others = [joined(1), joined(2)];
            let mut first = Bootstrap::root(listener, &launch(0), LONG).unwrap();
            first.open_listeners(LONG).unwrap();
            let [dead, mut last] = others.map(|rank| rank.join().unwrap());
            drop(dead);
            let port = first.listeners.as_ref().unwrap().all[1].port();
            let _taken = TcpListener::bind(("127.0.0.1", port)).unwrap();
            let follows = scope.spawn(move || last.regroup(&[], LONG).unwrap().1);
            assert_eq!(first.regroup(&[], LONG).unwrap().1, [0, 2]);
            assert_eq!(follows.join().unwrap(), [0, 2]);
        });
    }
}
