//! Every interleaving of two or three threads, up to a bound of preemptions, and every reordering that the memory model allows, of the
//! table of handles. The code is that of the library.

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicUsize;
use loom::sync::{Arc, atomic::Ordering};
use loom::thread;

use crate::explored::{Borrowed, Handle, Table};

/// An object of a table, which notices when a thread reads it while another one ends it.
struct Object {
    /// Loom fails the test when two threads touch it, one of them to change it, and neither access happens before the other.
    memory: UnsafeCell<u32>,
    /// How many have ended.
    ended: Arc<AtomicUsize>,
}

impl Object {
    fn read(&self) -> u32 {
        // SAFETY: the pointer is valid, and loom fails the test before a race is one.
        self.memory.with(|memory| unsafe { *memory })
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: the pointer is valid, and loom fails the test before a race is one.
        self.memory.with_mut(|memory| unsafe { *memory = 0 });
        self.ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// A table, and the objects that have ended.
#[derive(Clone)]
struct Objects {
    table: &'static Table<Object>,
    ended: Arc<AtomicUsize>,
}

impl Objects {
    fn insert(&self, value: u32) -> Handle {
        let object = Object { memory: UnsafeCell::new(value), ended: self.ended.clone() };
        self.table.insert(object).unwrap()
    }

    /// The value of an object that is there.
    fn read(&self, handle: Handle) -> Option<u32> {
        self.table.get(handle).ok().map(|object| object.read())
    }

    fn take(&self, handle: Handle) -> Option<u32> {
        self.table.take(handle).ok().map(|object| object.read())
    }
}

/// Runs `test` in all ways, with a table that has two places, which are free.
fn explore(test: impl Fn(&Objects) + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let place = Box::into_raw(Box::new(Table::new(1, &["", "object"])));
        // SAFETY: freed below, when all threads have ended.
        let objects = Objects { table: unsafe { &*place }, ended: Arc::new(AtomicUsize::new(0)) };
        for handle in [objects.insert(0), objects.insert(0)] {
            objects.take(handle).unwrap();
        }
        test(&objects);
        // SAFETY: made above, and of nobody else any more: tests join their threads.
        drop(unsafe { Box::from_raw(place) });
    });
}

#[test]
fn an_object_is_read_whole_or_has_ended() {
    explore(|objects| {
        let handle = objects.insert(7);
        let reads = {
            let objects = objects.clone();
            thread::spawn(move || objects.read(handle))
        };
        assert_eq!(objects.take(handle), Some(7));
        // In the same place.
        let other = objects.insert(8);
        assert_ne!(other, handle);
        assert!([None, Some(7)].contains(&reads.join().unwrap()));
        assert_eq!((objects.read(handle), objects.read(other)), (None, Some(8)));
    });
}

#[test]
fn of_two_that_end_an_object_one_has_it() {
    explore(|objects| {
        let handle = objects.insert(7);
        let ends = {
            let objects = objects.clone();
            thread::spawn(move || objects.table.borrow(handle).map(Borrowed::discard).is_ok())
        };
        let taken = objects.take(handle);
        assert_ne!(ends.join().unwrap(), taken.is_some());
        assert_eq!(objects.ended.load(Ordering::Relaxed), 3);
        assert_eq!(objects.read(handle), None);
    });
}

#[test]
fn what_is_put_back_is_found_again() {
    explore(|objects| {
        let handle = objects.insert(7);
        let borrows = {
            let objects = objects.clone();
            thread::spawn(move || objects.table.borrow(handle).map(|object| object.read()).ok())
        };
        let taken = objects.take(handle);
        let borrowed = borrows.join().unwrap();
        // One may refuse the other.
        assert!([(None, Some(7)), (Some(7), None), (Some(7), Some(7))].contains(&(taken, borrowed)));
        assert_eq!(objects.take(handle), if taken.is_none() { Some(7) } else { None });
    });
}

#[test]
fn each_place_has_one_object() {
    explore(|objects| {
        let works = {
            let objects = objects.clone();
            thread::spawn(move || {
                let handle = objects.insert(1);
                assert_eq!(objects.read(handle), Some(1));
                handle
            })
        };
        // Meanwhile the first free place is another one, and then the same again.
        let (first, second) = (objects.insert(2), objects.insert(3));
        assert_eq!(objects.take(first), Some(2));
        let third = objects.insert(4);
        let other = works.join().unwrap();
        assert_eq!([other, second, third].map(|handle| objects.take(handle)), [Some(1), Some(3), Some(4)]);
        assert_eq!(objects.ended.load(Ordering::Relaxed), 6);
    });
}

#[test]
fn a_thread_reads_what_another_has_made() {
    explore(|objects| {
        let passed = Arc::new(AtomicUsize::new(0));
        let makes = {
            let (objects, passed) = (objects.clone(), passed.clone());
            thread::spawn(move || passed.store(objects.insert(7), Ordering::Relaxed))
        };
        let handle = passed.load(Ordering::Relaxed);
        // Who got the handle in no order with the insertion may not find the object, but finds it whole.
        assert!(handle == 0 || [None, Some(7)].contains(&objects.read(handle)));
        makes.join().unwrap();
    });
}
