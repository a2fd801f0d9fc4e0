//! A client of the launcher's PMI, version 1: lines of `name=value` words over a socket that the launcher left in `PMI_FD`. Rank 0
//! puts its address into the key-value space of the job, the others get it after a barrier.
//!
//! The launcher closes the socket after `finalize`, and kills the job if a process ends without it. So a process has one session,
//! finalized at once, and rank 0 keeps its port for later jobs of the same ranks.

use std::ffi::CStr;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use gdsync::error::printable;
use parking_lot::Mutex;

use super::connection::FIX_FILES;
use super::environment::{hash, is_loopback};
use super::rendezvous::{Rendezvous, RootListener, Target, address, listen};
use crate::error::{Error, Result};
use crate::wait::Deadline;

/// The key of the address of rank 0.
const KEY: &str = "gdsync-root";

/// Longer lines are not read. PMI allows 1,024 bytes.
const MAX_LINE: usize = 64 << 10;

const WHO: &str = "the launcher (PMI)";

const FIX: &str = "set MASTER_ADDR and MASTER_PORT to the host and a free port of rank 0 \
                   (mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500), then PMI is not used";

/// The result of a session, which is kept.
#[derive(Debug)]
struct Found {
    root: String,
    /// The hash of the name of the job's key-value space.
    token: u64,
    /// Rank 0.
    listener: Option<TcpListener>,
}

static FOUND: Mutex<Option<Result<Found>>> = Mutex::new(None);

/// Finds rank 0 by PMI, or returns what an earlier session found; and the token of the job.
pub(super) fn session(rank: usize, host: Option<&str>, deadline: &Deadline) -> Result<(Rendezvous, u64)> {
    let mut found = FOUND.lock();
    let found = found.get_or_insert_with(|| find(rank, host, deadline)).as_ref().map_err(Error::clone)?;
    let rendezvous = match &found.listener {
        Some(listener) => {
            Rendezvous::Listen(RootListener::new(listener.try_clone().map_err(|error| {
                Error::bootstrap_os("its socket", "cannot be used again", error, FIX_FILES)
            })?))
        }
        None => Rendezvous::Dial(Target::Address(found.root.clone())),
    };
    Ok((rendezvous, found.token))
}

fn find(rank: usize, host: Option<&str>, deadline: &Deadline) -> Result<Found> {
    if symbol(c"MPI_Init") {
        let fix = "boot over MPI (Builder::init_over), or set MASTER_ADDR and MASTER_PORT";
        return Err(Error::bootstrap(WHO, "is the MPI library's, which this process has loaded", fix));
    }
    let fd = std::env::var("PMI_FD").ok().and_then(|fd| fd.trim().parse().ok());
    let fd = fd.ok_or_else(|| Error::launch("PMI_FD is not the number of a descriptor", FIX))?;
    let listener = (rank == 0).then(|| listen_at(host)).transpose()?;
    let (listener, root) = listener.unzip();
    let (root, token) = talk(&duplicate(fd)?, root.as_deref(), deadline)?;
    Ok(Found { root, token, listener })
}

/// The whole session; `root` is the address of rank 0, at rank 0. Returns it and the token of the job.
fn talk(stream: &UnixStream, root: Option<&str>, deadline: &Deadline) -> Result<(String, u64)> {
    let mut client = Client { stream: BufReader::new(stream), deadline };
    client.ask("init pmi_version=1 pmi_subversion=1", "response_to_init")?;
    let space = client.ask("get_my_kvsname", "my_kvsname")?.get("kvsname")?;
    if let Some(root) = root {
        client.ask(&format!("put kvsname={space} key={KEY} value={root}"), "put_result")?;
    }
    client.ask("barrier_in", "barrier_out")?;
    let root = client.ask(&format!("get kvsname={space} key={KEY}"), "get_result")?.get("value")?;
    client.ask("finalize", "finalize_ack")?;
    Ok((root, hash(&space)))
}

/// Rank 0: a socket at a free port, and the address that the others dial.
fn listen_at(host: Option<&str>) -> Result<(TcpListener, String)> {
    let host = match host {
        Some(host) => host.to_owned(),
        None => {
            let name = std::fs::read_to_string("/proc/sys/kernel/hostname").map_err(|error| {
                let fix = "set MASTER_ADDR for all ranks";
                Error::bootstrap_os("this host", "its name cannot be read", error, fix)
            })?;
            name.trim().to_owned()
        }
    };
    let bracketed = if host.contains(':') { format!("[{host}]") } else { host };
    let any = if is_loopback(&bracketed) { &bracketed } else { "any" };
    let listener = listen(&format!("{any}:0"))?;
    let port = address(&listener)?.port();
    Ok((listener, format!("{bracketed}:{port}")))
}

/// Whether a library of this process has the symbol.
fn symbol(name: &CStr) -> bool {
    // SAFETY: the name ends with a zero byte; nothing is called.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    !found.is_null()
}

/// Duplicates the launcher's socket: the descriptor may be used by others too.
fn duplicate(fd: i32) -> Result<UnixStream> {
    let system =
        |error| Error::bootstrap_os(WHO, format!("PMI_FD is {fd}, which cannot be used"), error, FIX);
    if fd < 0 {
        return Err(system(std::io::Error::from_raw_os_error(libc::EBADF)));
    }
    // SAFETY: the number is not -1, and is only used in this call, which fails for one that is not open.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    Ok(fd.try_clone_to_owned().map_err(system)?.into())
}

struct Client<'a> {
    stream: BufReader<&'a UnixStream>,
    deadline: &'a Deadline,
}

/// A line of the launcher.
struct Answer(String);

impl Answer {
    fn get(&self, name: &str) -> Result<String> {
        let words = self.0.split_whitespace().filter_map(|word| word.split_once('='));
        let value = words.into_iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_owned());
        value.ok_or_else(|| {
            Error::bootstrap(WHO, format!("answered '{}', without {name}", printable(self.0.trim())), FIX)
        })
    }
}

impl Client<'_> {
    /// Sends a command; the answer must be `expected`, without an error code.
    fn ask(&mut self, command: &str, expected: &str) -> Result<Answer> {
        let name = command.split(' ').next().unwrap_or_default();
        let lost = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
                let what = format!("{name} of {WHO}, which some ranks have not called");
                self.deadline
                    .error(what, "see that the launcher has started all ranks, and that each calls init")
            }
            _ => Error::bootstrap_os(WHO, format!("{name} failed"), error, FIX),
        };
        let mut socket = *self.stream.get_ref();
        self.limit(socket).map_err(lost)?;
        socket.write_all(format!("cmd={command}\n").as_bytes()).map_err(lost)?;
        let line = self.read_line().map_err(lost)?;
        if !line.ends_with('\n') {
            let what = match line.len() {
                ..MAX_LINE => format!("closed the connection in {name}: a process can use it only once"),
                _ => format!("answered {name} with a line of more than {MAX_LINE} bytes"),
            };
            return Err(Error::bootstrap(WHO, what, FIX));
        }
        let answer = Answer(line);
        let code = answer.get("rc").unwrap_or_else(|_| "0".to_owned());
        if answer.get("cmd")? != expected || code != "0" {
            let what = format!("answered '{}' to '{command}'", printable(answer.0.trim()));
            return Err(Error::bootstrap(WHO, what, FIX));
        }
        Ok(answer)
    }

    /// Limits the next call on the socket to the deadline.
    fn limit(&self, socket: &UnixStream) -> std::io::Result<()> {
        // A limit of zero is an error.
        let limit = Some(self.deadline.remaining().max(Duration::from_millis(1)));
        socket.set_read_timeout(limit)?;
        socket.set_write_timeout(limit)
    }

    /// Reads a line with its end, or up to the end of the connection or the longest length. The deadline is for the line: a launcher
    /// that sends a byte at a time does not extend it.
    fn read_line(&mut self) -> std::io::Result<String> {
        let mut line = Vec::new();
        while !line.ends_with(b"\n") && line.len() < MAX_LINE {
            if self.deadline.remaining().is_zero() {
                return Err(std::io::ErrorKind::TimedOut.into());
            }
            self.limit(self.stream.get_ref())?;
            let some = self.stream.fill_buf()?;
            let end = some.iter().position(|byte| *byte == b'\n').map_or(some.len(), |at| at + 1);
            line.extend_from_slice(&some[..end]);
            self.stream.consume(end);
            if end == 0 {
                break;
            }
        }
        Ok(String::from_utf8_lossy(&line).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Generous: reached only by a test that fails.
    const LONG: Duration = Duration::from_secs(60);

    /// Runs a session against a launcher that answers line for line; returns what it was told too.
    fn played(root: Option<&str>, answers: &[&str], limit: Duration) -> (Result<(String, u64)>, Vec<String>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            let launcher = scope.spawn(move || {
                let mut lines = BufReader::new(&theirs).lines();
                let mut told = Vec::new();
                for answer in answers {
                    told.push(lines.next().unwrap().unwrap());
                    (&theirs).write_all(answer.as_bytes()).unwrap();
                }
                // Only a deadline may end a session that gets no answer.
                if limit < LONG {
                    told.extend(lines.next().map(|line| line.unwrap()));
                    lines.next();
                }
                told
            });
            let found = talk(&ours, root, &Deadline::after(limit));
            drop(ours);
            (found, launcher.join().unwrap())
        })
    }

    const ANSWERS: [&str; 6] = [
        "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n",
        "cmd=my_kvsname kvsname=kvs_1_0_99_host\n",
        "cmd=put_result rc=0 msg=success\n",
        "cmd=barrier_out\n",
        "cmd=get_result rc=0 msg=success value=[::1]:20\n",
        "cmd=finalize_ack\n",
    ];

    #[test]
    fn a_whole_session() {
        let (found, told) = played(Some("[::1]:20"), &ANSWERS, LONG);
        assert_eq!(found.unwrap(), ("[::1]:20".to_owned(), hash("kvs_1_0_99_host")));
        let expected = [
            "cmd=init pmi_version=1 pmi_subversion=1",
            "cmd=get_my_kvsname",
            "cmd=put kvsname=kvs_1_0_99_host key=gdsync-root value=[::1]:20",
            "cmd=barrier_in",
            "cmd=get kvsname=kvs_1_0_99_host key=gdsync-root",
            "cmd=finalize",
        ];
        assert_eq!(told, expected);
        let others = [ANSWERS[0], ANSWERS[1], ANSWERS[3], ANSWERS[4], ANSWERS[5]];
        let (found, told) = played(None, &others, LONG);
        assert_eq!(found.unwrap().0, "[::1]:20");
        assert!(!told.iter().any(|line| line.contains("put")), "{told:?}");
    }

    #[test]
    fn bad_answers_are_reported() {
        for (at, answer, expected) in [
            (0, "cmd=response_to_init pmi_version=2 rc=-1\n", "rc=-1' to 'init"),
            (0, "nonsense\n", "answered 'nonsense', without cmd"),
            (1, "cmd=my_kvsname\n", "without kvsname"),
            (1, "cmd=barrier_out\n", "answered 'cmd=barrier_out' to 'get_my_kvsname'"),
            (4, "cmd=get_result rc=-1 msg=key_not_found value=unknown\n", "key_not_found"),
            (3, "cmd=barr", "closed the connection in barrier_in"),
            (0, &"c".repeat(MAX_LINE + 1), "65536 bytes"),
        ] {
            let mut answers = ANSWERS[..=at].to_vec();
            answers[at] = answer;
            let (found, _) = played(Some("[::1]:20"), &answers, LONG);
            let error = found.unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, Error::Bootstrap { .. }) && text.contains(expected), "{text}");
            assert!(text.contains("set MASTER_ADDR"), "{text}");
        }
    }

    #[test]
    fn a_silent_or_dripping_launcher_runs_into_the_deadline() {
        let soon = Duration::from_millis(100);
        let (found, told) = played(None, &ANSWERS[..2], soon);
        let error = found.unwrap_err();
        assert!(matches!(&error, Error::Deadline { what, .. } if what.contains("barrier_in")), "{error}");
        assert_eq!(told.last().unwrap(), "cmd=barrier_in");
        let (ours, theirs) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            // Until the other side has given up.
            scope.spawn(move || {
                while (&theirs).write_all(b"c").is_ok() {
                    thread::sleep(Duration::from_millis(1));
                }
            });
            let error = talk(&ours, None, &Deadline::after(soon)).unwrap_err();
            drop(ours);
            assert!(error.to_string().contains("init"), "{error}");
        });
    }

    #[test]
    fn bad_descriptors_are_reported() {
        for fd in [-1, 1_000_000] {
            let error = duplicate(fd).unwrap_err().to_string();
            assert!(
                error.contains(&format!("PMI_FD is {fd}")) && error.contains("Bad file descriptor"),
                "{error}"
            );
        }
    }

    #[test]
    fn the_address_is_what_others_dial() {
        for (host, expected) in [("127.0.0.1", "127.0.0.1:"), ("::1", "[::1]:"), ("node-7", "node-7:")] {
            match listen_at(Some(host)) {
                Ok((listener, root)) => {
                    let port = address(&listener).unwrap().port();
                    assert_eq!(root, format!("{expected}{port}"));
                    assert_eq!(address(&listener).unwrap().ip().is_loopback(), host != "node-7");
                }
                // A machine without IPv6.
                Err(error) => assert_eq!(host, "::1", "{error}"),
            }
        }
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        assert!(listen_at(None).unwrap().1.starts_with(&format!("{}:", name.trim())));
    }

    #[test]
    fn symbols_are_found() {
        assert!(symbol(c"getpid"));
        assert!(!symbol(c"MPI_Init"));
    }

    /// A launcher that answers with any lines.
    #[test]
    fn any_answers_are_an_address_or_an_error() {
        bolero::check!().with_type::<(u8, Vec<u8>)>().for_each(|(good, bytes)| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let others = [ANSWERS[0], ANSWERS[1], ANSWERS[3], ANSWERS[4], ANSWERS[5]];
            for answer in &others[..usize::from(*good) % others.len()] {
                (&theirs).write_all(answer.as_bytes()).unwrap();
            }
            (&theirs).write_all(bytes).unwrap();
            theirs.shutdown(std::net::Shutdown::Write).unwrap();
            if let Err(error) = talk(&ours, None, &Deadline::after(LONG)) {
                assert!(!error.to_string().chars().any(char::is_control), "{error}");
            }
        });
    }
}
