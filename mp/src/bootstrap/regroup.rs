//! How the ranks that are left find each other again.
//!
//! The lowest rank that is there leads. Each rank knocks at the doors of those below it, from rank 0 on: a process that is gone
//! has no door any more. At the first that is there it says hello, and waits to be told who the others are; if that rank goes
//! meanwhile, it tries the next one. A rank that finds nobody below it leads: it knocks at the doors of those above it, and waits
//! until each has said hello or is gone. So nobody is left out who is there, and nobody is waited for who is not.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::slice;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use super::conn::{Conn, Failure, Step, drive, wait};
use super::doors::Doors;
use super::frame::{Job, Kind};
use super::{Bootstrap, MAX_PAYLOAD, announce};
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// Longest wait for one answer to a connection request.
const KNOCK: Duration = Duration::from_secs(1);

/// How often the leader looks round, and a rank knocks where nobody answers.
const TICK: Duration = Duration::from_millis(20);

const FIX_LATE: &str = "let all ranks that are left call it; give up those that hang";

/// What knocking at a door brought.
enum Knock {
    /// Somebody is there.
    There(TcpStream),
    /// The process is gone.
    Gone,
    /// Nothing can be said yet.
    Silent(io::Error),
}

fn knock(door: SocketAddr, deadline: &Deadline) -> Knock {
    // At least a moment: a limit of zero is an error of its own.
    let limit = deadline.remaining().clamp(Duration::from_millis(1), KNOCK);
    match TcpStream::connect_timeout(&door, limit) {
        // Without a listener, a socket that dials a port of its own range can reach itself.
        Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => Knock::Gone,
        Ok(stream) => Knock::There(stream),
        Err(error) if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset) => {
            Knock::Gone
        }
        Err(error) => Knock::Silent(error),
    }
}

/// A rank above the leader.
enum Seat {
    /// It was not heard of. The connection, if it is there, breaks when its process goes.
    Awaited(Option<TcpStream>),
    Here(Conn),
    Gone,
}

/// Who leads, and who follows.
struct Group {
    rank: u32,
    job: Job,
    doors: Arc<Doors>,
    /// Ranks that are left out.
    without: Vec<usize>,
}

impl Bootstrap {
    /// Connects the ranks that are there, but for those of `without`, and returns their former ranks. All that are there must
    /// call it, and may again after a failure.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] for a rank that the others leave out, or without [`Bootstrap::open_doors`];
    /// [`Error::Deadline`] names ranks that are there, and late.
    pub(crate) fn regroup(&mut self, without: &[usize], timeout: Duration) -> Result<(Self, Vec<usize>)> {
        let deadline = Deadline::after(timeout);
        self.leave();
        let Some(doors) = self.doors.clone() else {
            if self.job.size == 1 {
                return Ok((Self::new(0, self.job, Vec::new()), vec![0]));
            }
            let what = "was not connected by Communicator::init, and cannot find the others again";
            return Err(Error::bootstrap("this rank", what, "restart the job"));
        };
        let mut group = Group { rank: self.rank, job: self.job, doors, without: without.to_vec() };
        loop {
            let (mut next, ranks) = group.meet(&deadline)?;
            match next.open_doors(deadline.remaining()) {
                Ok(()) => return Ok((next, ranks)),
                // One has died since: the others see that as well, and meet again.
                Err(Error::Bootstrap { .. }) if !deadline.is_over() => sleep(TICK),
                Err(error) => return Err(error),
            }
        }
    }
}

impl Bootstrap {
    /// Ends this exchange, so that nobody waits in it for this rank.
    fn leave(&mut self) {
        if self.failed.is_none() {
            let what = "has left to shrink the communicator, as all that are left have to";
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
        bootstrap._former = Some(self.doors.clone());
        bootstrap
    }

    /// Waits for what `leader` says; `None` when it is gone.
    fn follow(&self, leader: u32, deadline: &Deadline) -> Result<Option<(Bootstrap, Vec<usize>)>> {
        let door = self.doors.all[leader as usize];
        let peer = format!("rank {leader} ({door})");
        let stream = loop {
            match knock(door, deadline) {
                Knock::There(stream) => break stream,
                Knock::Gone => return Ok(None),
                Knock::Silent(error) if deadline.is_over() => {
                    let what = "could not be reached, and nothing says that it is gone";
                    return Err(Error::bootstrap_os(peer, what, error, FIX_LATE));
                }
                Knock::Silent(_) => sleep(TICK),
            }
        };
        let Ok(mut conn) = Conn::new(stream, peer) else { return Ok(None) };
        conn.max_payload = MAX_PAYLOAD;
        let without: Vec<u8> = self.without.iter().flat_map(|&rank| (rank as u64).to_be_bytes()).collect();
        conn.send(self.job.frame(Kind::Hello, self.rank, &without));
        let mut answer = None;
        let what = "shrink (it answers when all that are left have called it)";
        let driven = drive(slice::from_mut(&mut conn), leader, what, deadline, |_, conn| {
            // What is wrong with the connection, or on it, is none of the leader's words: it is gone.
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
        Ok(Some((self.bootstrap(own, &ranks, vec![conn]), ranks)))
    }

    fn lead(&mut self, deadline: &Deadline) -> Result<(Bootstrap, Vec<usize>)> {
        let mut seats: Vec<Seat> = (0..self.job.size)
            .map(|rank| if rank > self.rank { Seat::Awaited(None) } else { Seat::Gone })
            .collect();
        let mut strangers = Vec::new();
        loop {
            while let Ok((stream, address)) = self.doors.own.accept() {
                strangers.extend(Conn::new(stream, address.to_string()).map(|mut conn| {
                    // Ranks to leave out, at most all.
                    conn.max_payload = 8 * seats.len();
                    conn
                }));
            }
            strangers = self.hear(strangers, &mut seats);
            let late = self.look_round(&mut seats, deadline);
            if late.is_empty() {
                break;
            }
            if deadline.is_over() {
                let names: Vec<_> = late.iter().map(|rank| format!("rank {rank}")).collect();
                let error = deadline.error(format!("shrink: waiting for {} ({FIX_LATE})", names.join(", ")));
                let frame = self.job.frame(Kind::Failed, late[0], error.to_string().as_bytes());
                for seat in &mut seats {
                    if let Seat::Here(conn) = seat {
                        conn.farewell(frame.clone());
                    }
                }
                return Err(error);
            }
            let here = seats.iter().filter_map(|seat| match seat {
                Seat::Here(conn) => Some(conn.fd()),
                Seat::Awaited(Some(stream)) => Some(stream.as_raw_fd()),
                _ => None,
            });
            let fds =
                std::iter::once(self.doors.own.as_raw_fd()).chain(strangers.iter().map(Conn::fd)).chain(here);
            let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            wait(&mut fds.map(poll).collect::<Vec<_>>(), deadline.remaining().min(TICK))?;
        }
        let mut members = vec![self.rank as usize];
        let mut peers = Vec::new();
        for (rank, seat) in seats.into_iter().enumerate() {
            if let Seat::Here(mut conn) = seat {
                conn.peer = format!("rank {} (before: rank {rank})", members.len());
                members.push(rank);
                peers.push(conn);
            }
        }
        let list: Vec<u8> = members.iter().flat_map(|&rank| (rank as u64).to_be_bytes()).collect();
        let welcome = self.job.frame(Kind::Welcome, self.rank, &list);
        peers.iter_mut().for_each(|conn| conn.send(welcome.clone()));
        drive(&mut peers, 1, "shrink", deadline, |_, conn| {
            // Who goes now is missed by the first exchange.
            let done = conn.flush().unwrap_or_else(|_| {
                conn.drop_output();
                true
            });
            Ok(Step { done, events: if done { 0 } else { libc::POLLOUT } })
        })
        .map_err(|failure| failure.error)?;
        Ok((self.bootstrap(0, &members, peers), members))
    }

    /// Gives those a seat that have said hello; returns the others.
    fn hear(&mut self, strangers: Vec<Conn>, seats: &mut [Seat]) -> Vec<Conn> {
        let mut silent = Vec::new();
        for mut conn in strangers {
            match conn.fill() {
                Ok(false) => silent.push(conn),
                Ok(true) => self.seat(conn, seats),
                // A rank that gave up, or knocked to see whether this one is there.
                Err(_) => {}
            }
        }
        silent
    }

    fn seat(&mut self, mut conn: Conn, seats: &mut [Seat]) {
        let Ok(hello) = conn.take_any() else { return };
        let (rank, header) = (hello.header.rank as usize, hello.header);
        let fits =
            header.kind == Kind::Hello && (header.token, header.size) == (self.job.token, self.job.size);
        if !fits || rank <= self.rank as usize || rank >= seats.len() {
            return conn.farewell(self.job.frame(Kind::Refused, self.rank, b"it does not belong here"));
        }
        self.without.extend(ranks(&hello.payload).into_iter().filter(|&other| other != self.rank as usize));
        // In place of a connection that it has closed since, if there was one.
        seats[rank] = Seat::Here(conn);
    }

    /// Looks who is there of those that were not heard of, or are gone since; returns those that are late.
    fn look_round(&self, seats: &mut [Seat], deadline: &Deadline) -> Vec<u32> {
        let mut late = Vec::new();
        for (seat, rank) in seats.iter_mut().zip(0..) {
            let is_out = self.without.contains(&(rank as usize));
            match seat {
                Seat::Here(conn) if is_out => {
                    conn.farewell(self.job.frame(
                        Kind::Refused,
                        self.rank,
                        b"the other ranks gave this one up",
                    ));
                    *seat = Seat::Gone;
                }
                Seat::Awaited(_) if is_out => *seat = Seat::Gone,
                _ => {}
            }
            // It gave up, or is gone: its door tells.
            if let Seat::Here(conn) = seat
                && conn.expect_silence(Kind::Hello).is_err()
            {
                *seat = Seat::Awaited(None);
            }
            if let Seat::Awaited(probe) = seat {
                if probe.as_ref().is_some_and(is_broken) {
                    *probe = None;
                }
                if probe.is_none() {
                    match knock(self.doors.all[rank as usize], deadline) {
                        Knock::There(stream) => {
                            *probe = stream.set_nonblocking(true).is_ok().then_some(stream)
                        }
                        Knock::Gone => *seat = Seat::Gone,
                        Knock::Silent(_) => {}
                    }
                }
            }
            if matches!(seat, Seat::Awaited(_)) {
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
