//! A rank whose reports to the others are anything.

use std::time::Duration;

use mp::{Communicator, Exchange};

/// Rank 1 of two, which reports what rank 0 does, with changes.
#[derive(Debug)]
struct Hostile {
    changes: Vec<(u16, u8)>,
}

impl Exchange for Hostile {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        2
    }

    fn allgather(&mut self, bytes: &[u8], _: Duration) -> mp::Result<Vec<Vec<u8>>> {
        let mut theirs = bytes.to_vec();
        // Some for each call.
        for (at, change) in self.changes.split_off(self.changes.len().saturating_sub(3)) {
            let at = usize::from(at) % (theirs.len() + 1);
            match theirs.get_mut(at) {
                Some(byte) => *byte ^= change,
                None => theirs.truncate(usize::from(change)),
            }
        }
        Ok(vec![bytes.to_vec(), theirs])
    }
}

/// Both ranks would be one process with one set of queue pairs, so some of these communicators are built, and end at once.
#[test]
fn any_report_of_a_rank_is_taken_or_refused() {
    bolero::check!().with_iterations(40).with_type::<Vec<(u16, u8)>>().for_each(|changes| {
        let exchange = Hostile { changes: changes.clone() };
        match Communicator::builder().timeout(Duration::from_millis(300)).init_over(exchange) {
            Ok(comm) => drop(comm),
            Err(error) => assert!(!error.to_string().chars().any(char::is_control), "{error}"),
        }
    });
}
