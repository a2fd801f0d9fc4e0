//! Matching by MPI's rules: a message goes to the oldest receive that takes it, and a receive gets the oldest message that it takes.
//!
//! Neither side is searched linearly. Receives that look at the same fields (the source or not, the same bits of the tag) have one
//! shape, and a program uses few shapes. For each shape a look-up finds the oldest that is equal in these fields; the oldest of
//! these is the match. Messages are indexed by a shape only once a receive of that shape has been looked up among them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Whose messages a receive takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Messages of all ranks.
    Any,
    /// Messages of this rank.
    Rank(usize),
}

impl From<usize> for Source {
    fn from(rank: usize) -> Self {
        Self::Rank(rank)
    }
}

/// Which tags a receive takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    /// All tags.
    Any,
    /// This tag.
    Is(u64),
    /// Tags equal to `value` in the bits of `mask`.
    Masked {
        /// The wanted bits.
        value: u64,
        /// The bits that are compared.
        mask: u64,
    },
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("any tag"),
            Self::Is(tag) => write!(f, "tag {tag}"),
            Self::Masked { value, mask } => write!(f, "a tag that is {value:#x} in the bits {mask:#x}"),
        }
    }
}

impl From<u64> for Tag {
    fn from(tag: u64) -> Self {
        Self::Is(tag)
    }
}

/// Shapes that messages are indexed by at a time. A program that uses more has them indexed again and again.
const SHAPES: usize = 8;

/// The fields of a message that are compared: the source or not, and bits of the tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    source: bool,
    mask: u64,
}

impl Shape {
    fn key(self, source: usize, tag: u64) -> Key {
        Key { shape: self, source: if self.source { source } else { 0 }, tag: tag & self.mask }
    }
}

/// The messages that a receive takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    shape: Shape,
    source: usize,
    tag: u64,
}

impl Key {
    pub(super) fn new(source: Source, tag: Tag) -> Self {
        let (value, mask) = match tag {
            Tag::Any => (0, 0),
            Tag::Is(tag) => (tag, u64::MAX),
            Tag::Masked { value, mask } => (value, mask),
        };
        match source {
            Source::Any => Shape { source: false, mask }.key(0, value),
            Source::Rank(rank) => Shape { source: true, mask }.key(rank, value),
        }
    }

    /// The only rank whose messages it takes, if there is one.
    pub(super) fn source(&self) -> Option<usize> {
        self.shape.source.then_some(self.source)
    }
}

/// Where a receive waits: its key and its number.
pub(super) type Place = (Key, u64);

/// A message that no receive has taken yet.
#[derive(Debug)]
pub(super) struct Arrival<M> {
    /// Counts arrivals.
    number: u64,
    pub(super) source: usize,
    pub(super) tag: u64,
    pub(super) message: M,
}

/// Receives that wait for messages, and messages that wait for receives.
#[derive(Debug)]
pub(super) struct Matcher<R, M> {
    receives: BTreeMap<Place, R>,
    /// The shapes of the receives, and how many have each.
    receive_shapes: BTreeMap<Shape, usize>,
    messages: BTreeMap<u64, Arrival<M>>,
    index: BTreeSet<Place>,
    /// The shapes that all messages are indexed by.
    indexed: Vec<Shape>,
    /// The number of the newest receive or message.
    next: u64,
}

impl<R, M> Default for Matcher<R, M> {
    fn default() -> Self {
        let ((receives, receive_shapes), (messages, index, indexed)) = <_>::default();
        Self { receives, receive_shapes, messages, index, indexed, next: 0 }
    }
}

impl<R, M> Matcher<R, M> {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Adds a receive that waits.
    pub(super) fn post(&mut self, key: Key, receive: R) -> Place {
        let place = (key, self.number());
        self.receives.insert(place, receive);
        *self.receive_shapes.entry(key.shape).or_default() += 1;
        place
    }

    /// The oldest receive that takes such a message.
    pub(super) fn receive_for(&mut self, source: usize, tag: u64) -> Option<R> {
        let oldest = |shape: &Shape| {
            let key = shape.key(source, tag);
            self.receives.range((key, 0)..=(key, u64::MAX)).next().map(|(place, _)| *place)
        };
        let place = self.receive_shapes.keys().filter_map(oldest).min_by_key(|(_, number)| *number)?;
        self.cancel(place)
    }

    /// Removes a receive, if it still waits.
    pub(super) fn cancel(&mut self, place: Place) -> Option<R> {
        let receive = self.receives.remove(&place)?;
        let count = self.receive_shapes.get_mut(&place.0.shape).expect("each receive is counted");
        *count -= 1;
        if *count == 0 {
            self.receive_shapes.remove(&place.0.shape);
        }
        Some(receive)
    }

    /// Removes all receives whose keys are selected.
    pub(super) fn cancel_if(&mut self, is_selected: impl Fn(&Key) -> bool) -> Vec<R> {
        let places: Vec<_> = self.receives.keys().filter(|(key, _)| is_selected(key)).copied().collect();
        places.into_iter().filter_map(|place| self.cancel(place)).collect()
    }

    /// Keeps a message that no receive takes yet.
    pub(super) fn keep(&mut self, source: usize, tag: u64, message: M) {
        let number = self.number();
        self.put_back(Arrival { number, source, tag, message });
    }

    /// As [`Matcher::keep`], in its former place among the others.
    pub(super) fn put_back(&mut self, arrival: Arrival<M>) {
        let Arrival { number, source, tag, .. } = arrival;
        self.index.extend(self.indexed.iter().map(|shape| (shape.key(source, tag), number)));
        self.messages.insert(number, arrival);
    }

    /// The oldest message that a receive with this key would get.
    pub(super) fn find(&mut self, key: Key) -> Option<&Arrival<M>> {
        if self.messages.is_empty() {
            return None;
        }
        self.index_by(key.shape);
        let (_, number) = self.index.range((key, 0)..=(key, u64::MAX)).next()?;
        self.messages.get(number)
    }

    /// The messages that no receive has taken, oldest first.
    pub(super) fn messages(&self) -> impl Iterator<Item = &Arrival<M>> {
        self.messages.values()
    }

    /// Removes the message that [`Matcher::find`] finds.
    pub(super) fn take(&mut self, key: Key) -> Option<Arrival<M>> {
        let number = self.find(key)?.number;
        let arrival = self.messages.remove(&number)?;
        for shape in &self.indexed {
            self.index.remove(&(shape.key(arrival.source, arrival.tag), number));
        }
        if self.messages.is_empty() {
            self.indexed.clear();
        }
        Some(arrival)
    }

    /// Indexes all messages by this shape.
    fn index_by(&mut self, shape: Shape) {
        if self.indexed.contains(&shape) {
            return;
        }
        if self.indexed.len() == SHAPES {
            self.indexed.clear();
            self.index.clear();
        }
        self.indexed.push(shape);
        let place = |arrival: &Arrival<M>| (shape.key(arrival.source, arrival.tag), arrival.number);
        self.index.extend(self.messages.values().map(place));
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// The rules of MPI, by a linear search in order.
    #[derive(Default)]
    struct Model {
        receives: Vec<(usize, Source, Tag)>,
        messages: Vec<(usize, usize, u64)>,
    }

    fn takes(source: Source, tag: Tag, from: usize, of: u64) -> bool {
        let is_source = match source {
            Source::Any => true,
            Source::Rank(rank) => rank == from,
        };
        is_source
            && match tag {
                Tag::Any => true,
                Tag::Is(tag) => tag == of,
                Tag::Masked { value, mask } => (value ^ of) & mask == 0,
            }
    }

    impl Model {
        fn arrive(&mut self, id: usize, from: usize, of: u64) -> Option<usize> {
            match self.receives.iter().position(|&(_, source, tag)| takes(source, tag, from, of)) {
                Some(at) => Some(self.receives.remove(at).0),
                None => {
                    self.messages.push((id, from, of));
                    None
                }
            }
        }

        fn find(&self, source: Source, tag: Tag) -> Option<usize> {
            self.messages.iter().position(|&(_, from, of)| takes(source, tag, from, of))
        }
    }

    #[derive(Clone, Debug)]
    enum Op {
        Message(usize, u64),
        Receive(Source, Tag),
        Cancel(usize),
        /// Takes a message without a receive, and perhaps puts it back.
        Probe(Source, Tag, bool),
        Lose(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        let source = || prop_oneof![Just(Source::Any), (0..3usize).prop_map(Source::Rank)];
        let masked = (0..8u64, 0..8u64).prop_map(|(value, mask)| Tag::Masked { value, mask });
        let tag = prop_oneof![2 => Just(Tag::Any), 4 => (0..8u64).prop_map(Tag::Is), 3 => masked];
        prop_oneof![
            8 => (0..3usize, 0..8u64).prop_map(|(from, tag)| Op::Message(from, tag)),
            8 => (source(), tag.clone()).prop_map(|(source, tag)| Op::Receive(source, tag)),
            2 => any::<usize>().prop_map(Op::Cancel),
            2 => (source(), tag, any::<bool>()).prop_map(|(source, tag, back)| Op::Probe(source, tag, back)),
            1 => (0..3usize).prop_map(Op::Lose),
        ]
    }

    /// Both agree on every match of a program.
    fn agrees(ops: Vec<Op>) {
        let (mut model, mut matcher) = (Model::default(), Matcher::<usize, usize>::default());
        let mut places = Vec::new();
        for (id, op) in ops.into_iter().enumerate() {
            match op {
                Op::Message(from, tag) => {
                    let got = matcher.receive_for(from, tag);
                    assert_eq!(got, model.arrive(id, from, tag));
                    if got.is_none() {
                        matcher.keep(from, tag, id);
                    }
                }
                Op::Receive(source, tag) => {
                    let key = Key::new(source, tag);
                    let got = matcher.take(key).map(|arrival| arrival.message);
                    assert_eq!(got, model.find(source, tag).map(|at| model.messages.remove(at).0));
                    if got.is_none() {
                        places.push((id, matcher.post(key, id)));
                        model.receives.push((id, source, tag));
                    }
                }
                Op::Cancel(n) if !places.is_empty() => {
                    let (id, place) = places[n % places.len()];
                    let at = model.receives.iter().position(|receive| receive.0 == id);
                    assert_eq!(matcher.cancel(place), at.map(|at| model.receives.remove(at).0));
                }
                Op::Probe(source, tag, is_put_back) => {
                    let taken = matcher.take(Key::new(source, tag));
                    let at = model.find(source, tag);
                    assert_eq!(
                        taken.as_ref().map(|arrival| arrival.message),
                        at.map(|at| model.messages[at].0)
                    );
                    match (taken, at) {
                        (Some(arrival), Some(_)) if is_put_back => matcher.put_back(arrival),
                        (Some(_), Some(at)) => drop(model.messages.remove(at)),
                        _ => {}
                    }
                }
                Op::Lose(rank) => {
                    let mut lost = matcher.cancel_if(|key| key.source() == Some(rank));
                    lost.sort_unstable();
                    let is_lost = |receive: &mut (usize, Source, Tag)| receive.1 == Source::Rank(rank);
                    let expected: Vec<_> =
                        model.receives.extract_if(.., is_lost).map(|(id, ..)| id).collect();
                    assert_eq!(lost, expected);
                }
                Op::Cancel(_) => {}
            }
        }
        assert_eq!(matcher.receives.len(), model.receives.len());
        assert_eq!(matcher.receive_shapes.values().sum::<usize>(), model.receives.len());
        assert_eq!(matcher.messages.len(), model.messages.len());
        assert!(matcher.indexed.len() <= SHAPES);
        assert_eq!(matcher.index.len(), matcher.messages.len() * matcher.indexed.len());
    }

    /// The longest program. Miri takes 0.2 s for an operation.
    const OPS: usize = if cfg!(miri) { 40 } else { 200 };

    proptest! {
        #[test]
        fn matches_are_those_of_mpi(ops in vec(op(), 0..OPS)) {
            agrees(ops);
        }
    }
}
