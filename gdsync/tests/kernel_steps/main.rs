//! Kernels of the application that run sends and waits by themselves: on a GPU the one of `kernel.cu`, otherwise the same in
//! Rust on the simulated driver.

mod app;
#[path = "../common/mod.rs"]
mod common;
mod endings;
#[path = "../cuda/place.rs"]
mod place;
#[path = "../cuda/simulated.rs"]
mod simulated;

use std::collections::VecDeque;

use app::{App, kernel_places};
use common::{PATIENCE, Side, assert_clean, until};
use gdsync::Error;
use gdsync::stream::{Batch, KernelSteps, Launch, Stream};
use gdsync::verbs::{RecvWr, SendWr};
use place::Place;
use simulated::OK;

/// Messages of a launch, in each direction.
const BOUNCES: u32 = 6;

/// Two sides of a ping-pong on a GPU. A message leaves from the first 8 bytes of a side, and arrives at the other's byte 64.
struct Table<'a> {
    place: &'a Place,
    sides: [Side; 2],
    streams: [Stream; 2],
    posted: [u64; 2],
}

impl<'a> Table<'a> {
    fn new(place: &'a Place) -> Self {
        let build = |q: gdsync::verbs::QpBuilder| q.max_send_wr(64).max_recv_wr(64);
        let (a, b) = place.pair(256, build);
        let streams = [place.stream(PATIENCE), place.stream(PATIENCE)];
        Self { place, sides: [a, b], streams, posted: [0; 2] }
    }

    fn receive(&mut self, who: usize, count: u32) {
        let side = &self.sides[who];
        for _ in 0..count {
            let sges = [side.mr.sge(64, 8).unwrap()];
            let post = || side.qp.post_recv(&[RecvWr { wr_id: self.posted[who], sges: &sges }]);
            // The stream may still have to pass completions that were seen.
            until(|| match post() {
                Ok(_) => true,
                Err(Error::QueueFull { .. }) => false,
                Err(error) => panic!("{error}"),
            });
            self.posted[who] += 1;
        }
    }

    fn send(&self, who: usize, batch: &mut Batch) -> gdsync::Result<()> {
        let side = &self.sides[who];
        batch.send(&side.qp, &SendWr::send(&[side.mr.sge(0, 8)?]).id(5)).map(drop)
    }

    /// Blocks until both streams are done, and all went well.
    fn finish(&self) {
        for stream in &self.streams {
            stream.synchronize(PATIENCE).unwrap();
        }
        assert_clean(&[&self.sides[0], &self.sides[1]]);
    }

    /// The first sends and waits in one step, the second waits in one and sends in the next.
    fn steps(&mut self, who: usize) -> KernelSteps {
        let stream = self.streams[who].clone();
        self.receive(who, BOUNCES);
        stream
            .record_steps(|stream| {
                for _ in 0..BOUNCES {
                    let mut batch = Batch::new();
                    if who == 1 {
                        batch.wait_recv(&self.sides[who].qp)?;
                        stream.submit(&mut batch)?;
                    }
                    self.send(who, &mut batch)?;
                    if who == 0 {
                        batch.wait_recv(&self.sides[who].qp)?;
                    }
                    batch.wait_all_sends(&self.sides[who].qp)?;
                    stream.submit(&mut batch)?;
                }
                Ok(())
            })
            .unwrap()
    }
}

/// All steps of a side, in order.
fn all(who: usize) -> Vec<u32> {
    (0..BOUNCES * if who == 0 { 1 } else { 2 }).collect()
}

/// Two kernels play, two launches of each under way, with eager messages between them. Rings go round often.
#[test]
fn kernels_bounce_messages() {
    const ROUNDS: u64 = 200;
    for place in kernel_places() {
        let mut table = Table::new(&place);
        let steps = [0, 1].map(|who| table.steps(who));
        assert_eq!([0, 1].map(|who| steps[who].len()), [0, 1].map(|who| all(who).len()));
        let mut idle: VecDeque<_> = (0..2).map(|_| [0, 1].map(|who| App::new(&place, &all(who)))).collect();
        let mut under_way = VecDeque::new();
        for round in 0..ROUNDS {
            if under_way.len() == 2 {
                idle.push_back(check(&table, under_way.pop_front().unwrap()));
            }
            let apps = idle.pop_front().unwrap();
            // The receives of the recording are those of the first round. All are posted before anybody sends: a peer that is not
            // ready is not asked for ever.
            if round > 0 {
                (0..2).for_each(|who| table.receive(who, BOUNCES));
            }
            let launches = [0, 1].map(|who| {
                apps[who].forget();
                launch(&table, who, &steps[who], &apps[who], 1000 * round)
            });
            under_way.push_back((round, apps, launches));
            if round % 7 == 3 {
                table.receive(1, 1);
                let mut batch = Batch::new();
                table.send(0, &mut batch).unwrap();
                batch.wait_all_sends(&table.sides[0].qp).unwrap();
                table.streams[0].submit_within(&mut batch, PATIENCE).unwrap();
                table.streams[1].wait_recv(&table.sides[1].qp).unwrap();
            }
        }
        for round in under_way {
            check(&table, round);
        }
        table.finish();
    }
}

/// What a round has received, in the order of its steps.
fn check(table: &Table<'_>, (round, apps, launches): (u64, [App; 2], [Launch; 2])) -> [App; 2] {
    for (who, (app, launch)) in apps.iter().zip(&launches).enumerate() {
        launch.wait(&table.streams[who], PATIENCE).unwrap();
        assert!(launch.completions().iter().all(|completion| completion.wait(PATIENCE).is_ok()));
        let log = app.log();
        assert!(log.iter().all(|(result, _)| *result == OK), "{:?} round {round}: {log:?}", table.place);
        // Behind a step that only sends, the next message may be there already.
        let received: Vec<_> = log.iter().step_by(1 + who).map(|(_, received)| *received).collect();
        let of_other = |n| 1000 * round + if who == 0 { 2 * n + 1 } else { n };
        let expected: Vec<_> = (0..u64::from(BOUNCES)).map(of_other).collect();
        assert_eq!(received, expected, "{:?} round {round}", table.place);
    }
    apps
}

/// Launches a kernel that runs steps, and sends numbers from `first` on.
fn launch(table: &Table<'_>, who: usize, steps: &KernelSteps, app: &App, first: u64) -> Launch {
    let (stream, memory) = (&table.streams[who], table.sides[who].memory());
    let launched = steps.launch_within(stream, PATIENCE, |program| {
        app.launch(table.place, stream, program, memory, first);
        Ok::<_, Error>(())
    });
    launched.unwrap()
}

/// A kernel ends early, or is never launched: the stream runs what is left, and the other side need not wait.
#[test]
fn steps_that_are_left_are_run_by_the_stream() {
    for place in kernel_places() {
        let mut table = Table::new(&place);
        let steps = [0, 1].map(|who| table.steps(who));
        let two = App::new(&place, &[0, 1]);
        let apps = [0, 1].map(|who| App::new(&place, &all(who)));
        launch(&table, 0, &steps[0], &two, 0);
        steps[1].launch(&table.streams[1], |_| Ok::<_, Error>(())).unwrap();
        table.finish();
        assert_eq!(two.results(), [OK; 2]);
        // The rings are as if all had been run: another round is whole.
        (0..2).for_each(|who| table.receive(who, BOUNCES));
        (0..2).for_each(|who| drop(launch(&table, who, &steps[who], &apps[who], 0)));
        table.finish();
        assert!(apps.iter().all(|app| app.results().iter().all(|result| *result == OK)));
        assert_eq!(table.sides[1].memory().word64(64).unwrap().load(), u64::from(BOUNCES) - 1);
    }
}

/// A step that is not the next one does nothing, and the kernel is told.
#[test]
fn steps_run_once_and_in_order() {
    for place in kernel_places() {
        let mut table = Table::new(&place);
        let steps = [0, 1].map(|who| table.steps(who));
        let apps = [App::new(&place, &[1, 0, 0, 1, 2, 3, 4, 99, 5, 6, 5]), App::new(&place, &all(1))];
        (0..2).for_each(|who| drop(launch(&table, who, &steps[who], &apps[who], 0)));
        table.finish();
        let told = simulated::OUT_OF_ORDER;
        assert_eq!(apps[0].results(), [told, OK, told, OK, OK, OK, OK, told, OK, told, told]);
    }
}

/// One launch may have several kernels, one after the other.
#[test]
fn a_second_kernel_goes_on_where_the_first_ended() {
    for place in kernel_places() {
        let mut table = Table::new(&place);
        let steps = [0, 1].map(|who| table.steps(who));
        let apps = [App::new(&place, &[0, 1]), App::new(&place, &[1, 2, 3, 4, 5])];
        let other = App::new(&place, &all(1));
        let (stream, memory) = (&table.streams[0], table.sides[0].memory());
        let launched = steps[0].launch(stream, |program| {
            apps.iter().for_each(|app| app.launch(&place, stream, program, memory, 0));
            Ok::<_, Error>(())
        });
        launched.unwrap();
        launch(&table, 1, &steps[1], &other, 0);
        table.finish();
        assert_eq!(apps[0].results(), [OK, OK]);
        assert_eq!(apps[1].results(), [simulated::OUT_OF_ORDER, OK, OK, OK, OK]);
    }
}
