//! Errors in the words of the header: names of Rust become those of C.

use std::fmt::Display;

use gdsync_capi_support::guard::in_words;

/// What texts of the crates below say, and what a program in C calls it. Phrases come before the names that they contain.
const WORDS: &[(&str, &str)] = &[
    ("(CommunicatorBuilder::timeout)", "(timeout_ns)"),
    (" (Communicator::barrier is another one)", ""),
    (", CommunicatorBuilder::spawn)", ")"),
    (", or let rank 0 start the others (CommunicatorBuilder::spawn)", ""),
    (", or build with IntraHostPath::Queues", ""),
    (" (Context::stage, MP_GPU_PATH)", " (MP_GPU_PATH)"),
    (" (GDSYNC_PATH, DeviceConfig::route)", " (GDSYNC_PATH)"),
    (", by Stream::abort or by a panic that dropped it", ""),
    (" (Stream::with_timeout)", " (call gda_progress, and try again)"),
    (
        "before the capture make an mp::Channel (channel = comm.channel(rank, &[(&buffer, range)], None), at both ranks); in the \
         capture write channel.post_recv_on_stream(stream) where the receive is queued, channel.isend_on_stream(stream, &buffer, range) \
         for the send and channel.wait_recv_on_stream(stream) for the wait",
        "before the capture make a channel (gda_chan_create, at both ranks); in the capture call gda_chan_post where the receive is \
         queued, gda_chan_send for the send and gda_chan_wait with GDA_CHAN_RECV for the wait",
    ),
    (
        "sendrecv_on_stream, or Communicator::irecv_on_stream, send_on_stream, wait_on_stream",
        "gda_recv, gda_send and gda_req_on_stream with one stream",
    ),
    ("ask for its size first (Tagged::improbe), or receive into more", "receive into more"),
    (
        "call CommunicatorBuilder::init in all ranks, or init_over in all",
        "pass an exchange in all ranks, or in none",
    ),
    ("boot over MPI (Builder::init_over)", "pass an exchange to gda_comm_create"),
    ("switch it off: CommunicatorBuilder::bind, or MP_BIND=0", "switch it off: MP_BIND=0"),
    ("use Batch::repeatable_host_fn, or submit the function to the stream", "call gda_stream_call"),
    ("one of Communicator::register", "one of gda_mem_reg without GDA_CACHED"),
    ("or to Device::find", "or in gda_config.device"),
    ("at most mp::MAX_INLINE, or a registration", "at most gda_info.max_inline, or gda_put"),
    ("use Stream::cuda, or pass", "pass a stream of cuStreamCreate, or"),
    ("capture with Stream::capture instead, and", "capture with gda_capture_begin instead, and"),
    ("on Stream::raw in it", "on the stream in it"),
    (": Batch::before_launches", ""),
    ("the caller of Batch::run", "the caller"),
    ("call Memory::flush", "read it"),
    ("the receive was cancelled", "the receive was cancelled (gda_req_cancel)"),
    ("wait_recv_in_batch or wait_recv_on_stream", "wait_recv_in_batch"),
    ("post_recv_on_stream or post_recv_in_batch", "post_recv_in_batch"),
    ("post_recv_in_batch or post_recv_on_stream", "post_recv_in_batch"),
    ("Channel::wait_recv_in_batch", "gda_chan_wait with GDA_CHAN_RECV"),
    ("Channel::post_recv_in_batch", "gda_chan_post"),
    ("(Rma::signal, Rma::with_signal)", "(gda_put or gda_put_bytes with a signal)"),
    ("CommunicatorBuilder::init_over", "gda_comm_create with an exchange"),
    ("CommunicatorBuilder::init", "gda_comm_create"),
    ("CommunicatorBuilder::depth", "gda_config.depth"),
    ("CommunicatorBuilder::max_pieces", "gda_config.max_pieces"),
    ("Collectives::new", "gda_comm_create with GDA_COLLECTIVES"),
    ("Collectives::destroy", "gda_comm_destroy with GDA_COLLECTIVES"),
    ("Communicator::channels", "gda_chan_create"),
    ("Communicator::check", "gda_comm_lost"),
    ("Communicator::finalize", "gda_comm_destroy"),
    ("Communicator::init", "gda_comm_create"),
    ("Communicator::irecv", "gda_recv"),
    ("Communicator::lost", "gda_comm_lost"),
    ("Communicator::register", "gda_mem_reg"),
    ("Communicator::shrink", "gda_comm_shrink"),
    ("Gpu::alloc, Gpu::wrap", "gda_mem_reg with a GPU in gda_config"),
    ("Listener::address", "gda_listen"),
    ("Memory::from_raw", "gda_mem_reg without a GPU"),
    ("Stream::submit", "gda_batch_submit"),
    ("Stream::synchronize", "gda_stream_sync"),
    ("Tagged::destroy", "gda_comm_destroy with GDA_TAGGED"),
    ("Tagged::irecv", "gda_trecv"),
    ("Tagged::isend", "gda_tsend"),
    ("Tagged::new", "gda_comm_create with GDA_TAGGED"),
    ("Window::destroy", "gda_win_destroy"),
    ("mp::tagged", "gda_tsend and gda_trecv"),
    (" (Gpu::alloc)", ""),
    ("give one to CommunicatorBuilder::gpu", "name one in gda_config"),
    (" (NearPath::PeerCopies)", ""),
    ("`Via::Kernel`", "GDA_STREAM_KERNEL"),
    ("Via::Kernel", "GDA_STREAM_KERNEL"),
];

/// Conditions of waits, which texts take from their type.
const CONDITIONS: [(&str, &str); 4] =
    [("Cond::Geq", "GDA_GEQ"), ("Cond::Eq", "GDA_EQ"), ("Cond::And", "GDA_AND"), ("Cond::Nor", "GDA_NOR")];

/// The text of an error for programs in C.
pub(crate) fn in_c(error: &impl Display) -> String {
    in_words(error.to_string(), WORDS.iter().chain(&CONDITIONS))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    /// In texts that no program in C gets: of queue pairs of its own, of processes that Rust starts, of logs.
    const ELSEWHERE: &[&str] = &[
        "Qp::",
        "QpBuilder::",
        "Cq::",
        "Bootstrap::connect",
        "Launch::detect",
        "Window::beside",
        "Batch::post,",
        "Cond::{cond:?}",
    ];

    /// The string literals of a source without its tests.
    fn literals(source: &str) -> Vec<String> {
        let source = source.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        let lines = source.lines().filter(|line| !line.trim_start().starts_with("//"));
        let source = lines.collect::<Vec<_>>().join("\n").replace("'\"'", "");
        let (mut all, mut rest) = (Vec::new(), source.chars());
        while rest.by_ref().any(|c| c == '"') {
            let mut text = String::new();
            while let Some(c) = rest.next().filter(|&c| c != '"') {
                match c {
                    '\\' => match rest.next() {
                        // Goes on in the next line.
                        Some('\n') => {
                            let space = rest.as_str().len() - rest.as_str().trim_start().len();
                            rest = rest.as_str()[space..].chars();
                        }
                        other => text.extend(other),
                    },
                    c => text.push(c),
                }
            }
            all.push(text);
        }
        all
    }

    fn walk(directory: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                walk(&entry, found);
            } else if entry.extension().is_some_and(|extension| extension == "rs")
                && !entry.ends_with("tests.rs")
            {
                found.extend(literals(&fs::read_to_string(&entry).unwrap()));
            }
        }
    }

    /// A path of Rust, such as `Communicator::irecv`.
    fn has_path(text: &str) -> bool {
        text.match_indices("::").any(|(at, _)| {
            let is_name = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
            is_name(text[..at].chars().next_back()) && is_name(text[at + 2..].chars().next())
        })
    }

    #[test]
    fn no_text_of_the_crates_below_has_a_path_of_rust_in_c() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut texts = Vec::new();
        for place in ["mp/src", "gdsync/src", "gdsync/device/src"] {
            walk(&root.join(place), &mut texts);
        }
        let paths: Vec<_> = texts.iter().filter(|text| has_path(text)).collect();
        assert!(paths.len() > 60, "{paths:#?}");
        let left: Vec<_> = paths
            .iter()
            .map(in_c)
            .filter(|text| has_path(text) && !ELSEWHERE.iter().any(|known| text.contains(known)))
            .collect();
        assert!(left.is_empty(), "{left:#?}");
        // Each word is one of them, or of the devices.
        let mut all = texts;
        walk(&root.join("gdsync/rdma/src"), &mut all);
        let unused: Vec<_> =
            WORDS.iter().filter(|(rust, _)| !all.iter().any(|text| text.contains(rust))).collect();
        assert!(unused.is_empty(), "{unused:?}");
    }
}
