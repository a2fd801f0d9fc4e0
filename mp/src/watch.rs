//! A thread that looks after the connections, so that the program and its streams need not.

use std::io;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use parking_lot::{Condvar, Mutex};

use crate::link::SILENCE;
use crate::peer::Peer;
use crate::window::Lanes;

/// The thread; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(crate) fn start(peers: Arc<[Peer]>, lanes: Arc<Mutex<Vec<Arc<Lanes>>>>) -> io::Result<Self> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let told = stop.clone();
        let run = move || {
            let (stop, changed) = &*told;
            let mut stop = stop.lock();
            while !*stop {
                changed.wait_for(&mut stop, SILENCE);
                peers.iter().for_each(Peer::recycle);
                Lanes::recycle(&mut lanes.lock());
            }
        };
        let thread = Builder::new().name("mp-watch".into()).spawn(run)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        *self.stop.0.lock() = true;
        self.stop.1.notify_one();
        if let Some(thread) = self.thread.take() {
            // It cannot fail, and nothing is to be done if it did.
            let _ = thread.join();
        }
    }
}
