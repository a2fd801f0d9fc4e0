//! A bare TCP connection between two ranks, beside which messages over TCP are measured.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::str::from_utf8;
use std::time::Duration;

use gdasync::gdsync::hca::tcp_address;
use gdasync::measure::poll;
use gdasync::mp::Communicator;
use gdasync::results::Result;

pub(super) struct Socket {
    stream: TcpStream,
    bytes: Vec<u8>,
    is_first: bool,
    timeout: Duration,
}

impl Socket {
    /// Connects the ranks, for messages of `bytes` bytes.
    pub(super) fn connect(comm: &Communicator, bytes: usize, timeout: Duration) -> Result<Self> {
        let is_first = comm.rank() == 0;
        let listener =
            is_first.then(|| Result::Ok(TcpListener::bind((tcp_address(None)?, 0))?)).transpose()?;
        let told = listener.as_ref().map(|listener| listener.local_addr()).transpose()?;
        let told = comm.exchange(told.map_or_else(String::new, |at| at.to_string()).as_bytes(), timeout)?;
        let at: SocketAddr = from_utf8(&told[0])?.parse()?;
        let connected = (!is_first).then(|| TcpStream::connect_timeout(&at, timeout)).transpose()?;
        // From here on there is a connection to accept.
        comm.barrier(timeout)?;
        let stream = match (connected, listener) {
            (None, Some(listener)) => listener.accept()?.0,
            (stream, _) => stream.ok_or("no listener")?,
        };
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, bytes: vec![0; bytes.max(1)], is_first, timeout })
    }

    /// A round trip of a message.
    pub(super) fn ping(&mut self) -> Result<()> {
        if self.is_first {
            self.send(self.bytes.len())?;
        }
        self.receive(self.bytes.len())?;
        if self.is_first { Ok(()) } else { self.send(self.bytes.len()) }
    }

    /// Messages to the second rank, which answers the last one.
    pub(super) fn one_way(&mut self, count: u64) -> Result<()> {
        for _ in 0..count {
            if self.is_first { self.send(self.bytes.len()) } else { self.receive(self.bytes.len()) }?;
        }
        if self.is_first { self.receive(1) } else { self.send(1) }
    }

    fn send(&mut self, len: usize) -> Result<()> {
        let Self { stream, bytes, .. } = self;
        all(len, self.timeout, |at| stream.write(&bytes[at..len]))
    }

    fn receive(&mut self, len: usize) -> Result<()> {
        let Self { stream, bytes, .. } = self;
        all(len, self.timeout, |at| stream.read(&mut bytes[at..len]))
    }
}

/// Calls the socket until `len` bytes are through.
fn all(len: usize, timeout: Duration, mut call: impl FnMut(usize) -> std::io::Result<usize>) -> Result<()> {
    let mut done = 0;
    let through = poll(timeout, || {
        match call(done) {
            Ok(0) => return Err("the other rank has closed the socket".into()),
            Ok(count) => done += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        Result::Ok((done == len).then_some(()))
    })?;
    Ok(through.ok_or("no bytes came in time: the other rank has ended, or --timeout is too short")?)
}
