//! How rank 0 gets its peers: everybody may knock, only the ranks of the job get a seat.

use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::conn::{Conn, Failure, wait};
use super::frame::{Job, Kind};
use super::{MAX_PAYLOAD, announce};
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// How long a connection may take to introduce itself.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often those that said nothing are looked through.
const TICK: Duration = Duration::from_millis(250);

/// Pause after a failed accept, which a shortage of descriptors would repeat at once.
const BREATH: Duration = Duration::from_millis(10);

struct Lobby<'a> {
    listener: &'a TcpListener,
    job: Job,
    /// Ranks 1 and up.
    seats: Vec<Option<Conn>>,
    /// Connections that have not introduced themselves, and since when.
    strangers: Vec<(Conn, Instant)>,
    /// The last one turned away: likely the reason why a rank is missing.
    turned_away: Option<String>,
}

/// Waits until ranks 1 to `size - 1` have connected, as long as `can_come` has no error; they come back in this order.
pub(super) fn assemble(
    listener: &TcpListener,
    job: Job,
    deadline: &Deadline,
    can_come: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<Conn>> {
    let address =
        listener.local_addr().map_or_else(|_| "its socket".to_owned(), |address| address.to_string());
    listener.set_nonblocking(true).map_err(|error| {
        Error::bootstrap_os(address.clone(), "cannot use the socket", error, "pass a listening TCP socket")
    })?;
    let seats = (1..job.size).map(|_| None).collect();
    let mut lobby = Lobby { listener, job, seats, strangers: Vec::new(), turned_away: None };
    let outcome = lobby.fill_seats(&address, deadline, can_come);
    let mut conns: Vec<Conn> = lobby.seats.into_iter().flatten().collect();
    match outcome {
        Ok(()) => Ok(conns),
        Err(failure) => {
            announce(&mut conns, &job, &failure);
            Err(failure.error)
        }
    }
}

impl Lobby<'_> {
    fn fill_seats(
        &mut self,
        address: &str,
        deadline: &Deadline,
        can_come: &mut dyn FnMut() -> Result<()>,
    ) -> std::result::Result<(), Failure> {
        loop {
            self.accept();
            self.listen_to_strangers();
            for (seat, rank) in self.seats.iter_mut().zip(1..) {
                let present = seat.as_mut().map_or(Ok(()), |conn| conn.expect_silence(Kind::Hello));
                present.map_err(|error| Failure { rank, error })?;
            }
            let missing: Vec<u32> =
                (1..).zip(&self.seats).filter(|(_, seat)| seat.is_none()).map(|(rank, _)| rank).collect();
            let Some(&rank) = missing.first() else { return Ok(()) };
            can_come().map_err(|error| {
                let gone = match error {
                    Error::Child { rank, .. } => u32::try_from(rank).unwrap_or(u32::MAX),
                    _ => rank,
                };
                Failure { rank: gone, error }
            })?;
            if deadline.is_over() {
                return Err(Failure { rank, error: deadline.error(self.report(address, &missing)) });
            }
            let guests = self.strangers.iter().map(|(conn, _)| conn).chain(self.seats.iter().flatten());
            let mut fds: Vec<libc::pollfd> = std::iter::once(self.listener.as_raw_fd())
                .chain(guests.map(Conn::fd))
                .map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 })
                .collect();
            wait(&mut fds, deadline.remaining().min(TICK)).map_err(|error| Failure { rank: 0, error })?;
        }
    }

    fn report(&self, address: &str, missing: &[u32]) -> String {
        let ranks: Vec<String> = missing.iter().map(|rank| format!("rank {rank}")).collect();
        let note = self.turned_away.as_ref().map(|who| format!(" (turned away: {who})")).unwrap_or_default();
        format!("connections to rank 0 at {address}: waiting for {}{note}", ranks.join(", "))
    }

    fn accept(&mut self) {
        loop {
            let accepted =
                self.listener.accept().and_then(|(stream, address)| Conn::new(stream, address.to_string()));
            match accepted {
                Ok(conn) => self.strangers.push((conn, Instant::now())),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    self.turned_away = Some(format!("a connection, by the system: {error}"));
                    return sleep(BREATH);
                }
            }
        }
    }

    fn listen_to_strangers(&mut self) {
        for (mut conn, since) in std::mem::take(&mut self.strangers) {
            match conn.fill() {
                Ok(false) if since.elapsed() < PATIENCE => self.strangers.push((conn, since)),
                Ok(false) => self.turn_away(conn, "it did not introduce itself".to_owned()),
                Ok(true) => match self.seat_of(&mut conn) {
                    Ok(rank) => self.seat(conn, rank),
                    Err(why) => self.turn_away(conn, why),
                },
                Err(Error::Bootstrap { what, .. }) => self.turn_away(conn, format!("it {what}")),
                Err(other) => self.turn_away(conn, other.to_string()),
            }
        }
    }

    /// The rank that a hello asks for, or why it cannot have it.
    fn seat_of(&self, conn: &mut Conn) -> std::result::Result<u32, String> {
        let hello = conn.take_any().map_err(|error| error.to_string())?.header;
        if hello.kind != Kind::Hello {
            return Err("it did not begin with a hello".to_owned());
        }
        if hello.token != self.job.token {
            return Err("its job token is not the one of this job".to_owned());
        }
        if hello.size != self.job.size {
            return Err(format!("its world size is {}, but {} at rank 0", hello.size, self.job.size));
        }
        let seat = hello.rank.checked_sub(1).and_then(|index| self.seats.get(index as usize));
        match seat {
            None => Err(format!("rank {} has no place among {}", hello.rank, self.job.size)),
            Some(Some(owner)) => Err(format!("rank {} is taken: {}", hello.rank, owner.peer)),
            Some(None) => Ok(hello.rank),
        }
    }

    fn seat(&mut self, mut conn: Conn, rank: u32) {
        conn.peer = format!("rank {rank} ({})", conn.peer);
        conn.max_payload = MAX_PAYLOAD;
        self.seats[rank as usize - 1] = Some(conn);
    }

    fn turn_away(&mut self, mut conn: Conn, why: String) {
        tracing::warn!(peer = conn.peer, why, "connection turned away");
        // No token for strangers.
        let job = Job { token: 0, ..self.job };
        conn.farewell(job.frame(Kind::Refused, 0, why.as_bytes()));
        self.turned_away = Some(format!("{}, because {why}", conn.peer));
    }
}
