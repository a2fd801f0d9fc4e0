//! What is held, against a list of what should be: sends that wait for receives, over two queue pairs of the software HCA.

use std::time::Duration;

use gdsync::hca::SoftHcaConfig;
use gdsync::memory::Memory;
use gdsync::verbs::{Access, Context, Mr, RecvWr, SendWr};
use proptest::prelude::*;

use super::*;
use crate::communicator::Registration;
use crate::credit::{self, Credits};
use crate::ends::Ends;
use crate::link::{Link, Most};
use crate::peer::Way;
use crate::watch::Alarm;

/// Generous: reached only by a test that fails.
const LONG: Duration = Duration::from_secs(60);
const DEPTH: usize = 128;

#[derive(Clone, Debug)]
enum Step {
    /// A message of so many places with a piece of one of the buffers; a request keeps its order, or nobody does.
    Add {
        places: u32,
        buffer: usize,
        is_requested: bool,
    },
    /// So many more messages complete.
    Complete(usize),
    Settle,
    /// Somebody has seen that one of those complete is: which, from the newest on.
    Finish(usize),
    /// So many of the newest are gone.
    DropNewest(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (1..=3_u32, 0..2_usize, any::<bool>())
            .prop_map(|(places, buffer, is_requested)| Step::Add { places, buffer, is_requested }),
        2 => (1..4_usize).prop_map(Step::Complete),
        1 => Just(Step::Settle),
        2 => (0..4_usize).prop_map(Step::Finish),
        1 => (1..3_usize).prop_map(Step::DropNewest),
    ];
    prop::collection::vec(step, 1..40)
}

/// Held orders, and what should be.
struct Bed {
    link: Arc<Link>,
    ends: Arc<Ends>,
    buffers: [Registration; 2],
    mr: Mr,
    held: Held,
    /// Of those that should be held: the place of the last request in the queue, and how many it takes.
    model: VecDeque<(u64, u32)>,
    /// Those in the queue that are not complete, also where they are held no more.
    queued: VecDeque<(u64, u32)>,
    /// Orders that requests have.
    requested: Vec<Arc<Order>>,
    /// Requests of the queue that are complete.
    completed: u64,
}

impl Bed {
    fn new(context: &Context) -> gdsync::Result<Self> {
        let pd = context.alloc_pd()?;
        let register = || pd.register(&Memory::alloc(64)?, Access::LOCAL_WRITE);
        let build = || {
            let ends =
                Ends::build(true, || pd.build_qp().max_send_wr(DEPTH).max_recv_wr(DEPTH).rnr_retry(7))?;
            ends.connect(ends.address()).map(|()| ends)
        };
        let credits = Credits::new(&credit::table(1)?, 0, credit::Way::Own, Arc::new(Alarm::new(false)))?;
        let most = Most { depth: DEPTH, pieces: 1 };
        let link = Arc::new(Link::new(0, false, build()?, most, credits, None));
        let buffers = [Registration(register()?, None), Registration(register()?, None)];
        let (mr, ends) = (register()?, Arc::new(build()?));
        let (held, model, queued, requested) = Default::default();
        Ok(Self { link, ends, buffers, mr, held, model, queued, requested, completed: 0 })
    }

    fn run(&mut self, step: &Step) -> gdsync::Result<()> {
        match *step {
            Step::Add { places, buffer, is_requested } => {
                let sges = [self.mr.sge(0, 8)?];
                let sends: Vec<_> = (0..places).map(|_| SendWr::send(&sges)).collect();
                let place = self.ends.send.post_send_index(&sends)?;
                let (link, ends) = (&self.link, &self.ends);
                let make = |message| Order::new(link, ends, Way::Send, None, message);
                let message = Message { operation: "send", place, places, bytes: 8 };
                let order = self.held.add(message, &[(&self.buffers[buffer], 0..8)], false, make);
                assert_eq!((order.index(), order.places), (place, places));
                self.requested.extend(is_requested.then_some(order));
                self.model.push_back((place, places));
                self.queued.push_back((place, places));
            }
            Step::Complete(count) => {
                for (place, places) in self.queued.drain(..count.min(self.queued.len())) {
                    for _ in 0..places {
                        self.ends.recv.post_recv(&[RecvWr { wr_id: 0, sges: &[self.mr.sge(8, 8)?] }])?;
                    }
                    self.ends.send.send_completion(place).wait(LONG)?.ok()?;
                    self.completed = place + 1;
                }
            }
            Step::Settle => {
                self.held.settle();
                self.settle();
            }
            Step::Finish(back) => {
                let complete = |order: &&Arc<Order>| order.index() < self.completed;
                let Some(order) = self.requested.iter().rev().filter(complete).nth(back).cloned() else {
                    return Ok(());
                };
                self.held.finish(&order, 8);
                match self.model.front() {
                    Some(&(oldest, _)) if oldest == order.index() => drop(self.model.pop_front()),
                    Some(&(oldest, _)) if oldest < order.index() => self.settle(),
                    _ => {}
                }
            }
            Step::DropNewest(count) => {
                let left = self.model.len().saturating_sub(count);
                let bound = self.model.get(left).map_or(u64::MAX, |&(place, _)| place);
                self.held.drop_newest(|order| order.index() >= bound);
                self.model.truncate(left);
            }
        }
        Ok(())
    }

    fn settle(&mut self) {
        let completed = self.completed;
        while self.model.pop_front_if(|(place, _)| *place < completed).is_some() {}
    }

    fn check(&self) {
        assert_eq!(self.held.places(), self.model.iter().map(|&(_, places)| places as usize).sum::<usize>());
        assert_eq!(self.held.is_empty(), self.model.is_empty());
        assert_eq!(self.held.newest().map(|order| order.index()), self.model.back().map(|&(place, _)| place));
        assert!(self.held.orders().map(|order| order.index()).eq(self.model.iter().map(|&(place, _)| place)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100) })]

    #[test]
    fn places_are_those_of_what_is_under_way(steps in steps()) {
        let context = Context::soft(&SoftHcaConfig::default()).unwrap();
        let mut bed = Bed::new(&context).unwrap();
        for step in &steps {
            bed.run(step).unwrap();
            bed.check();
        }
        bed.run(&Step::Complete(usize::MAX)).unwrap();
        bed.run(&Step::Settle).unwrap();
        prop_assert_eq!(bed.held.places(), 0);
    }
}
