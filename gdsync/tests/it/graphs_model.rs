//! Any order of launches and eager work does what the same calls do without graphs.

use std::mem::{Discriminant, discriminant};
use std::time::Duration;

use crate::common::{PATIENCE, Side, assert_clean, bytes, pair, received, stream, tier};
use gdsync::error::{Error, Result};
use gdsync::stream::{Batch, Graph, Stream};
use gdsync::verbs::{Completion, RecvWr, SendWr, Wc};
use proptest::prelude::*;

const WORDS: usize = 4;
const GRAPHS: usize = 2;
const MESSAGES: usize = 512;

#[derive(Clone, Debug)]
enum Call {
    /// Sends this word.
    Send(usize),
    /// Sends so many bytes, in one or two blocks.
    Inline(usize),
    Write(usize, u32),
    WaitSend,
    WaitAll,
    /// Waits for the last send of these calls.
    WaitLast,
}

#[derive(Clone, Debug)]
enum Action {
    /// Captures the graph anew.
    Capture(usize),
    Launch(usize),
    Eager(Vec<Call>),
    /// Takes a completion.
    Poll,
    /// Prepares a send and gives it up.
    GiveUp,
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let call = prop_oneof![
        3 => (0..WORDS).prop_map(Call::Send),
        2 => (1..33usize).prop_map(Call::Inline),
        2 => (0..WORDS, any::<u32>()).prop_map(|(at, value)| Call::Write(at, value)),
        3 => Just(Call::WaitSend),
        1 => Just(Call::WaitAll),
        1 => Just(Call::WaitLast),
    ];
    prop::collection::vec(call, 0..6)
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        1 => (0..GRAPHS).prop_map(Action::Capture),
        6 => (0..GRAPHS).prop_map(Action::Launch),
        3 => calls().prop_map(Action::Eager),
        2 => Just(Action::Poll),
        1 => Just(Action::GiveUp),
    ]
}

/// The calls of one graph, in batches.
type Calls = Vec<Vec<Call>>;

/// What an action came to: the ids of its completions, or an error.
type Outcome = std::result::Result<Vec<u64>, Discriminant<Error>>;

struct Run {
    a: Side,
    b: Side,
    stream: Stream,
    graphs: [Option<Graph>; GRAPHS],
    accepted: usize,
    outcomes: Vec<Outcome>,
}

impl Run {
    fn new() -> Self {
        let (a, b) = pair(64 * MESSAGES, |q| q.max_send_wr(8).max_inline(32).max_recv_wr(MESSAGES));
        let wrs = (0..MESSAGES).map(|i| (i as u64, [b.mr.sge(64 * i, 64).unwrap()])).collect::<Vec<_>>();
        let wrs = wrs.iter().map(|(wr_id, sges)| RecvWr::new(sges).id(*wr_id)).collect::<Vec<_>>();
        b.qp.post_recv(&wrs).unwrap();
        Self {
            a,
            b,
            stream: stream("model").with_timeout(Duration::ZERO),
            graphs: [None, None],
            accepted: 0,
            outcomes: Vec::new(),
        }
    }

    /// Adds calls to a batch. Requests are numbered within them.
    fn fill(&self, batch: &mut Batch, calls: &[Call], sent: &mut Vec<Completion>) -> Result<Vec<Completion>> {
        let mut completions = Vec::new();
        let fixed: [u8; 32] = std::array::from_fn(|i| i.to_le_bytes()[0] + 1);
        for call in calls {
            let id = sent.len() as u64;
            let send = match call {
                Call::Send(word) => {
                    let ours = [self.a.mr.sge(4 * word, 4)?];
                    Some(batch.send(&self.a.qp, &SendWr::send(&ours).id(id).imm(1))?)
                }
                Call::Inline(len) => {
                    Some(batch.send(&self.a.qp, &SendWr::send_inline(&fixed[..*len]).id(id))?)
                }
                // Behind a send it could be seen by it, or not.
                Call::Write(..) if !sent.is_empty() => None,
                Call::Write(word, value) => {
                    batch.write_value32(&self.a.memory().word32(4 * word)?, *value);
                    None
                }
                Call::WaitSend => {
                    completions.push(batch.wait_send(&self.a.qp)?);
                    None
                }
                Call::WaitAll => {
                    completions.push(batch.wait_all_sends(&self.a.qp)?);
                    None
                }
                Call::WaitLast => {
                    sent.last().map_or(Ok(()), |last| batch.wait(last))?;
                    None
                }
            };
            completions.extend(send.clone());
            sent.extend(send);
        }
        Ok(completions)
    }

    fn eagerly(&self, batches: &[Vec<Call>]) -> Result<Vec<Completion>> {
        let mut batch = Batch::new();
        let mut sent = Vec::new();
        let completions = batches.iter().map(|calls| self.fill(&mut batch, calls, &mut sent));
        let completions = completions.collect::<Result<Vec<_>>>()?.concat();
        self.stream.submit(&mut batch)?;
        Ok(completions)
    }

    fn capture(&self, batches: &[Vec<Call>]) -> Result<Graph> {
        self.stream.capture(|stream| {
            let mut sent = Vec::new();
            batches.iter().try_for_each(|calls| {
                let mut batch = Batch::new();
                self.fill(&mut batch, calls, &mut sent)?;
                stream.submit(&mut batch)
            })
        })
    }

    /// Waits for what was accepted, and takes note of it.
    fn note(&mut self, batches: &[Vec<Call>], result: Result<Vec<Completion>>) {
        let is_send = |call: &&Call| matches!(call, Call::Send(_) | Call::Inline(_));
        let outcome = result.map_err(|error| discriminant(&error)).map(|completions| {
            self.accepted += batches.iter().flatten().filter(is_send).count();
            completions.iter().map(|c| c.wait(PATIENCE).unwrap().wr_id).collect()
        });
        self.stream.synchronize(PATIENCE).unwrap();
        self.outcomes.push(outcome);
    }

    fn poll(&mut self) {
        let id = self.a.qp.poll_send().map(|wc| wc.ok().unwrap().wr_id);
        self.outcomes.push(Ok(id.into_iter().collect()));
    }

    /// All messages, in order.
    fn messages(&self) -> Vec<(Wc, Vec<u8>)> {
        let message = |i: usize| {
            let wc = received(&self.b).ok().unwrap();
            (Wc { qpn: 0, ..wc }, bytes(&self.b, 64 * i, wc.byte_len as usize))
        };
        let all = (0..self.accepted).map(message).collect();
        assert_eq!(self.b.qp.poll_recv(), None, "a message too many");
        assert_clean(&[&self.a, &self.b]);
        all
    }
}

fn check(graphs: &[Calls], actions: &[Action]) {
    let (mut with, mut without) = (Run::new(), Run::new());
    let captured = |run: &Run| [0, 1].map(|g| run.graphs[g].is_some());
    for action in actions {
        match action {
            Action::Capture(g) => with.graphs[*g] = with.capture(&graphs[*g]).ok(),
            Action::Launch(g) if !captured(&with)[*g] => {}
            Action::Launch(g) => {
                let graph = with.graphs[*g].as_ref().unwrap();
                let result = graph.launch(&with.stream).map(|launch| launch.completions().to_vec());
                // What the graph cannot do as the calls would, it refuses, and nothing of it is done.
                let skip = matches!(result, Err(Error::GraphWaits { .. }));
                with.note(&graphs[*g], result);
                if skip {
                    with.outcomes.pop();
                } else {
                    let result = without.eagerly(&graphs[*g]);
                    without.note(&graphs[*g], result);
                }
            }
            Action::Eager(calls) => {
                let calls = [calls.clone()];
                for run in [&mut with, &mut without] {
                    let result = run.eagerly(&calls);
                    run.note(&calls, result);
                }
            }
            Action::Poll => [&mut with, &mut without].into_iter().for_each(Run::poll),
            Action::GiveUp => {
                for run in [&with, &without] {
                    drop(run.a.qp.prepare_send(&[SendWr::nop()]));
                }
            }
        }
        assert_eq!(with.outcomes.last(), without.outcomes.last(), "{action:?}");
    }
    assert_eq!(with.outcomes, without.outcomes);
    assert_eq!(with.messages(), without.messages());
    assert_eq!(with.a.memory().to_vec(), without.a.memory().to_vec());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: tier(20, 200, 4000), failure_persistence: None, max_shrink_iters: 500, ..ProptestConfig::default() })]

    #[test]
    fn launches_do_what_their_calls_would(
        graphs in prop::collection::vec(prop::collection::vec(calls(), 1..3), GRAPHS),
        actions in prop::collection::vec(action(), 1..40),
    ) {
        let first = (0..GRAPHS).map(Action::Capture);
        check(&graphs, &first.chain(actions).collect::<Vec<_>>());
    }
}
