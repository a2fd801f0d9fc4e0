//! Every interleaving, up to a bound of preemptions, and every reordering that the memory model allows, of the release of words. The code
//! is that of the library. The table of requests is explored where it is, in `gdsync-capi-support`.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use crate::release::Release;

const RELEASE: u64 = 1 << 62;

/// The word of a region.
type Word = Arc<AtomicU64>;

#[derive(Clone)]
struct Ranks {
    release: Arc<Release<Word>>,
    /// Of a region that was registered before.
    word: Word,
}

fn add(word: &Word) {
    word.fetch_add(RELEASE, Ordering::Relaxed);
}

impl Ranks {
    /// As `Collective::fail`.
    fn fail(&self) {
        if self.release.begin() {
            self.release.take().iter().for_each(add);
            self.release.end();
        }
    }

    /// As `Collective::register`.
    fn register(&self) -> Word {
        let word = Word::new(AtomicU64::new(0));
        if let Err(late) = self.release.add(word.clone()) {
            add(&late);
        }
        word
    }

    /// As `Request::is_complete` of one that has failed: then streams go on.
    fn is_complete(&self) -> bool {
        self.fail();
        !self.release.has_begun() || self.release.is_over()
    }
}

fn explore(test: impl Fn(Ranks) + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let (release, word) = (Arc::new(Release::new()), Word::new(AtomicU64::new(0)));
        assert!(release.add(word.clone()).is_ok());
        let ranks = Ranks { release, word };
        test(ranks.clone());
        assert_eq!(ranks.word.load(Ordering::Relaxed), RELEASE, "released once");
    });
}

#[test]
fn a_request_is_complete_behind_the_release_of_words() {
    explore(|ranks| {
        let (noticing, word) = (ranks.clone(), ranks.word.clone());
        let noticing = thread::spawn(move || noticing.fail());
        if ranks.is_complete() {
            assert_eq!(word.load(Ordering::Relaxed), RELEASE);
        }
        noticing.join().unwrap();
    });
}

#[test]
fn what_is_registered_meanwhile_is_released_once() {
    explore(|ranks| {
        let registering = ranks.clone();
        let registering = thread::spawn(move || registering.register());
        let noticing = ranks.clone();
        let noticing = thread::spawn(move || noticing.fail());
        ranks.fail();
        noticing.join().unwrap();
        assert_eq!(registering.join().unwrap().load(Ordering::Relaxed), RELEASE);
    });
}
