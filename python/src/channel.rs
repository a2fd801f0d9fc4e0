//! Channels: messages that repeat, in loops and graphs.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::buffer::Part;
use crate::request::needs_stream;
use crate::shared::Shared;
use crate::stream::Submitter;
use crate::{Any, OnStream};

#[pyclass(frozen, module = "gdasync")]
pub(crate) struct Channel {
    shared: Arc<Shared>,
    channel: mp::Channel,
    /// The GPU of what messages are received into.
    gpu: Option<i32>,
}

impl Channel {
    pub(crate) fn new(shared: &Arc<Shared>, channel: mp::Channel, places: Vec<Arc<Part>>) -> Self {
        let gpu = places.first().and_then(|place| place.gpu);
        shared.expose(places);
        Self { shared: shared.clone(), channel, gpu }
    }

    /// The stream of a receive.
    fn of_places(&self, stream: OnStream<'_, '_>, py: Python<'_>) -> PyResult<Arc<Submitter>> {
        Submitter::of(stream, self.gpu, py)?.ok_or_else(needs_stream)
    }
}

#[pymethods]
impl Channel {
    #[getter]
    fn rank(&self) -> usize {
        self.channel.rank()
    }

    #[pyo3(signature = (stream=None))]
    fn post_recv(&self, py: Python<'_>, stream: OnStream<'_, '_>) -> PyResult<()> {
        let (stream, of) = (self.of_places(stream, py)?, ("post_recv", Some(self.channel.rank())));
        self.shared.submit(py, of, &stream, |_, batch| self.channel.post_recv_in_batch(batch))
    }

    #[pyo3(signature = (stream=None))]
    fn wait_recv(&self, py: Python<'_>, stream: OnStream<'_, '_>) -> PyResult<()> {
        let (stream, of) = (self.of_places(stream, py)?, ("wait_recv", Some(self.channel.rank())));
        self.shared.submit(py, of, &stream, |_, batch| self.channel.wait_recv_in_batch(batch).map(drop))
    }

    #[pyo3(signature = (tensor, stream=None))]
    fn send(&self, tensor: Any<'_, '_>, stream: OnStream<'_, '_>) -> PyResult<()> {
        let (py, part) = (tensor.py(), Part::of(&self.shared.comm, tensor, false, false)?);
        let stream = Submitter::of(stream, part.gpu, py)?.ok_or_else(needs_stream)?;
        let sent = self.shared.submit(py, ("send", Some(self.channel.rank())), &stream, |_, batch| {
            let sent = self.channel.isend_in_batch(batch, &part.registration, 0..part.len())?;
            self.shared.comm.wait_in_batch(batch, &sent)?;
            Ok(sent)
        })?;
        if let Some(part) = stream.keep_in_capture(part) {
            self.shared.keep(sent, part);
        }
        Ok(())
    }
}
