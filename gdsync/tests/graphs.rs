//! Graphs on streams of the host.

mod common;
#[path = "common/replay.rs"]
mod replay;

use std::time::Duration;

use common::{Side, hca, stream_with};
use gdsync::stream::Stream;
use gdsync::verbs::QpBuilder;
use replay::Site;

struct Host;

impl Site for Host {
    fn side(&self, bytes: usize, build: &dyn Fn(QpBuilder) -> QpBuilder) -> Side {
        Side::new(&hca(), bytes, build)
    }

    fn stream(&self, wait_limit: Duration) -> Stream {
        stream_with("graphs", wait_limit)
    }
}

/// The producer index of the sends wraps, three blocks a launch.
#[test]
fn launches_and_eager_work_take_turns() {
    replay::mixed(&Host, replay::replays(40_000));
}

#[test]
fn launches_wait_for_what_comes_later() {
    replay::launched_ahead(&Host, 30);
}

#[test]
fn a_launch_that_is_refused_leaves_no_trace() {
    replay::refusals(&Host);
}

#[test]
fn a_failed_send_ends_a_launch_with_its_cause() {
    replay::a_send_fails(&Host);
}

#[test]
fn a_peer_that_goes_away_ends_a_launch() {
    replay::the_peer_goes_away(&Host);
}

#[test]
fn a_message_that_never_comes_ends_a_launch() {
    replay::a_message_never_comes(&Host);
}

#[test]
fn a_graph_outlives_queue_pair_and_stream() {
    replay::outlives_all(&Host);
}

#[test]
fn captures_that_fail_leave_no_trace() {
    replay::captures(&Host);
}

#[test]
fn words_are_waited_for_and_written_each_time() {
    replay::words(&Host);
}
