//! What is under way in one queue, oldest first, and what it holds until it is complete.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::request::Order;

/// Orders under way, each with what it keeps.
#[derive(Debug)]
pub(crate) struct Held<K> {
    queue: VecDeque<(Arc<Order>, K)>,
    /// Orders that are over. A new one takes the place of the oldest that no request has any more: that is cheaper than memory
    /// of its own. There are never more here and under way than were under way once.
    over: VecDeque<Arc<Order>>,
}

impl<K> Default for Held<K> {
    fn default() -> Self {
        Self { queue: VecDeque::new(), over: VecDeque::new() }
    }
}

impl<K> Held<K> {
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The newest order.
    pub(crate) fn newest(&self) -> Option<&Arc<Order>> {
        self.queue.back().map(|(order, _)| order)
    }

    /// All orders, oldest first.
    pub(crate) fn orders(&self) -> impl Iterator<Item = &Arc<Order>> {
        self.queue.iter().map(|(order, _)| order)
    }

    /// What all keep.
    pub(crate) fn kept(&self) -> impl Iterator<Item = &K> {
        self.queue.iter().map(|(_, kept)| kept)
    }

    /// Adds the newest order.
    pub(crate) fn add(&mut self, order: Order, kept: K) -> Arc<Order> {
        let mut oldest = self.over.pop_front();
        let order = match oldest.as_mut().and_then(Arc::get_mut) {
            Some(place) => {
                *place = order;
                oldest.expect("it was just written to")
            }
            None => Arc::new(order),
        };
        self.queue.push_back((order.clone(), kept));
        order
    }

    /// Lets go of the newest orders for which this holds.
    pub(crate) fn drop_newest(&mut self, mut is_gone: impl FnMut(&Order) -> bool) {
        while self.queue.pop_back_if(|(order, _)| is_gone(order)).is_some() {}
    }

    /// Lets go of what is complete, and keeps what came of it.
    pub(crate) fn settle(&mut self) {
        while self.queue.front().is_some_and(|(order, _)| order.keep()) {
            self.pop();
        }
    }

    /// Somebody has seen that `order` is complete, with so many bytes: so are those before it.
    pub(crate) fn finish(&mut self, order: &Arc<Order>, bytes: usize) {
        match self.queue.front() {
            Some((front, _)) if Arc::ptr_eq(front, order) => {
                let _ = order.kept.set(bytes);
                self.pop();
            }
            Some((front, _)) if front.completion.index() <= order.completion.index() => self.settle(),
            // By whoever has seen a later one, too.
            _ => {}
        }
    }

    /// Lets go of the oldest.
    fn pop(&mut self) {
        self.over.extend(self.queue.pop_front().map(|(order, _)| order));
    }
}
