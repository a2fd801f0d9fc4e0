//! A part of a copy that is offered to the other side.

use gdsync::protocol::offer::{self, Outcome};
use loom::sync::Arc;
use loom::thread;

use super::common::{L64, Plain, explore};

#[derive(Default)]
struct Shared {
    word: L64,
    /// The part that is offered.
    part: Plain,
}

/// What a side writes there: loom sees when both do.
fn write(shared: &Shared, by: u64) {
    shared.part.set(shared.part.get() + by);
}

#[test]
fn one_side_does_the_part_and_the_other_sees_it_done() {
    explore(4, || {
        let shared = Arc::new(Shared::default());
        let helper = shared.clone();
        assert!(offer::make(&shared.word, 1));
        let helper = thread::spawn(move || {
            // Packets may come late, and twice.
            for number in [1, 2, 1] {
                if offer::claim(&helper.word, number) {
                    write(&helper, 1);
                    offer::finish(&helper.word, number, number == 1);
                }
            }
        });
        for number in [1, 2] {
            if number == 2 && !offer::make(&shared.word, number) {
                panic!("the first is over");
            }
            let outcome = loop {
                match offer::settle(&shared.word, number) {
                    Outcome::Theirs => thread::yield_now(),
                    outcome => break outcome,
                }
            };
            assert_eq!(offer::settle(&shared.word, number), outcome, "it stays so");
            match outcome {
                Outcome::Done => assert_eq!(number, 1),
                Outcome::Refused => assert_eq!(number, 2),
                Outcome::Ours | Outcome::Theirs => write(&shared, 10),
            }
            // Whoever it was.
            assert!(shared.part.get() > 0);
        }
        helper.join().unwrap();
    });
}
