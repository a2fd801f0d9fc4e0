//! Software HCA: consumes mlx5 rings on a CPU, for machines without a card.
//!
//! It takes doorbells, fetches WQEs, checks state and keys, moves the payload and writes CQEs. It fails as a card fails:
//! RC order, acknowledge timeouts and retries, RNR NAKs, remote errors, flushes up to the doorbell record, CQ overrun.
//! It does not model a card's speed, PCIe ordering or firmware. Vendor codes are 0.
//!
//! # Who runs it
//!
//! The HCA is a state behind a lock. A step of it runs in the thread that rings a doorbell (so a small message is on the
//! wire when `post_send` returns), in a thread that polls a completion queue, in a host stream that waits for a
//! completion, or else in a service thread. The service thread sleeps while other threads poll, and on a futex in shared
//! memory while there is no work.
//!
//! Acknowledgements leave with the step after the one that received the message, so that replies go first. If no thread
//! polls again, the service thread sends them within a millisecond.
//!
//! Packets that the peer has not handled are no timeout while its process lives and is not stopped: its HCA waits for a processor. A
//! process that is stopped, or whose state in `/proc` cannot be read, costs the timeouts and retries.
//!
//! # What wakes it
//!
//! - A doorbell rung by the CPU or by a host stream: the ringing thread runs the step at once.
//! - A packet of another process: the sender wakes the futex if a thread sleeps on it.
//! - Its own timers: retry, RNR, delayed packets.
//! - A doorbell written by a GPU: the library announces the send when it is enqueued, and the service thread polls that
//!   doorbell from then on. It busy-polls first, then backs off to one eighth of the time waited, at most 5 ms.
//! - A doorbell that was never announced: found within a second.
//!
//! # As a card
//!
//! [`Card`] reads rings that other code allocated and filled: libmlx5, UCX, any program that writes mlx5 rings by itself.
//! Sends are found in doorbell registers, or by the send counters of the doorbell records, which tell everything that
//! registers do. Records are polled: continuously while there is work, then less and less, at least once per
//! millisecond. The service thread of a card asks for the highest priority, so that programs that spin on its core do not
//! delay it, and its threads block signals, which are for the program.
//!
//! It offers RC and UD queue pairs, shared receive queues, completion channels, CQEs of 64 and 128 bytes, sends without
//! completion, and payloads that mix inline data and buffers. Datagrams are single packets. Links are made by threads of
//! their own: a queue pair goes to RTR without its peer, and a peer that is not there is a retry error of the first send. Not
//! offered: inline data in CQEs, compressed CQEs, memory windows, XRC, DC, UMR.
//!
//! # Payload in GPU memory
//!
//! CPU reads of GPU memory are slow, CPU writes are fast, and some GPU memory is not mapped at all. The HCA takes the
//! fastest path for each message:
//!
//! | payload | path |
//! |---|---|
//! | up to 4 KiB, or from host memory | packets; the CPU reads and writes through the mapping |
//! | host to host over shared memory, 64 KiB and more: messages of one buffer, READs | cross-memory attach (CMA): the CPU of the receiver, or of the
//! requester of the READ, reads the other process, see below |
//! | from GPU memory, [`SoftHcaConfig::by_reference`] bytes and more, one buffer | by reference: one packet names the payload, a
//! copy engine of the receiver's GPU fetches it, over NVLink or through CUDA IPC (GPUDirect v2) |
//! | other payload from GPU memory; receivers that cannot follow a reference; READ responses | staged: a copy engine copies chunks
//! to pinned host memory, packets are cut from there (GPUDirect v1) |
//! | into GPU memory without a mapping | packets go to pinned host memory, a copy engine copies them on |
//!
//! Some receivers cannot follow a reference: pool and `cuMemCreate` memory, containers that do not share IPC, GPUs
//! without peer access, no GPU in use. The receiver reports this once per region, and the sender logs it. Only copy
//! engine threads call CUDA, never under the HCA's lock. Each GPU has one stream of the highest priority for all copies,
//! independent of the application's streams. If waiting streams fill all hardware channels
//! (`CUDA_DEVICE_MAX_CONNECTIONS`), copies stop; each is abandoned after [`copy_limit`](field@SoftHcaConfig::copy_limit), and the failed message
//! releases the streams.
//!
//! For a millisecond after a copy or a message of several packets begins, all threads involved busy-poll: those of the
//! HCAs and copy engines, and those that wait for completions.
//!
//! Messages complete in order, each when its payload is in place. Stores through a mapping are flushed first where the GPU
//! needs it: see [`Flush`](gdsync_device::cuda::Flush). Resetting or destroying a queue pair and deregistering a region
//! wait for the copies into its memory.
//!
//! # Cross-memory attach
//!
//! Long messages between host memories are copied once: a packet names the payload, and the receiver reads it with
//! `process_vm_readv`. Between two cores of an Intel Xeon, 1 MiB takes 60 to 77 us, against 92 us through the packet
//! ring. [`CmaPolicy`] sets the minimum length.
//!
//! If the kernel refuses the read (Yama's `ptrace_scope`, seccomp, another user namespace), the receiver answers the first
//! such message with a NAK, and the sender sends the bytes of this and all later ones. Nothing fails; the log records it
//! at `debug`. A random mark in the process's memory proves that it is the peer. The receiver checks lengths and keys
//! first, as for packets, reads at most 512 KiB per step, and completes nothing that the sender has withdrawn.
//!
//! A READ works the same way round: the responder checks key, right and range, then answers with a reference, and the
//! requester copies. Deregistering the region and the end of the queue pair revoke the reference by a packet first. The
//! requester completes the READ only after it has received everything sent before the end of its copy; if a revocation is
//! among it, it asks again.
//!
//! # Peers
//!
//! Queue pairs of one process use a loopback ring. Other processes of the host are linked through shared memory, handed
//! over an abstract Unix socket whose name is a hash of the [`Gid`](gdsync_device::Gid). Both must run as one user in one
//! network namespace and belong to one job ([`job_secret`]). When a process dies, its links report it at once: outstanding sends
//! fail with a retry error, everything else is flushed. (A card runs into its timeouts; so does this HCA when a peer is only
//! silent.) A dead link is freed when no queue pair is connected over it.
//!
//! # Other hosts
//!
//! With [`SoftHcaConfig::tcp`] links are TCP connections, one for two HCAs, also inside the host. The GID is the IP address that the HCA listens at,
//! the LID of its queue pairs' addresses the port. Packets are the same, as frames of the byte stream; references are not sent and
//! not followed, so payload in GPU memory is read through its mapping or staged. What a step sends leaves by one call of the socket, an
//! acknowledgement with the reply. Packets on their way use up no retry: TCP repeats them. It also tells the end of a peer's
//! process, and after 3.5 s without any answer, or without room at the peer, the end of the link. A listener greets whoever
//! connects; both sides prove that they know the [`job_secret`].
//!
//! With [`SoftHcaConfig::fabric`] the packets are messages of libfabric, and the TCP connections stay to greet and to tell the end of
//! peers, which providers do not. A peer that has made no room for a packet for 3.5 s is gone.

mod async_event;
mod card;
mod config;
mod core;
mod job;
mod keys;
mod links;
mod network;
mod packet;
mod peers;
mod qp;
mod soft;
mod srq;
mod wire;

pub use async_event::{AsyncEvent, AsyncEvents};
pub use card::{BlockedSignals, Card, CardCq, CardDoorbell, CardQp, CardSrq, CardTransport};
pub use config::{CmaPolicy, SoftHcaConfig};
pub use job::{job_secret, join_job};
pub use network::Network;
pub use soft::SoftHca;
pub use wire::{Interface, TCP, fabric_providers, interfaces, tcp_address};
