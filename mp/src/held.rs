//! What is under way in one queue, oldest first, and what it holds until it is complete.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::request::{Message, Order};

/// Orders under way, each with what it keeps.
#[derive(Debug)]
pub(crate) struct Held<K> {
    /// First those under way. Behind them, those that are over: a new order takes the place of the oldest of these if no request has
    /// that any more, which is cheaper than memory of its own. There are never more than were under way once.
    all: VecDeque<Place<K>>,
    under_way: usize,
}

/// Of an order, and what it keeps while it is under way, unless the next one keeps it too.
#[derive(Debug)]
struct Place<K>(Arc<Order>, Option<K>);

impl<K> Default for Held<K> {
    fn default() -> Self {
        Self { all: VecDeque::new(), under_way: 0 }
    }
}

impl<K> Held<K> {
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.under_way
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.under_way == 0
    }

    /// The newest order.
    pub(crate) fn newest(&self) -> Option<&Arc<Order>> {
        Some(&self.all[self.under_way.checked_sub(1)?].0)
    }

    /// The oldest order.
    fn oldest(&self) -> Option<&Arc<Order>> {
        self.all.front().filter(|_| !self.is_empty()).map(|Place(order, _)| order)
    }

    /// All orders, oldest first.
    pub(crate) fn orders(&self) -> impl Iterator<Item = &Arc<Order>> {
        self.all.iter().take(self.under_way).map(|Place(order, _)| order)
    }

    /// What all keep.
    pub(crate) fn kept(&self) -> impl Iterator<Item = &K> {
        self.all.iter().take(self.under_way).filter_map(|Place(_, kept)| kept.as_ref())
    }

    /// What the newest order keeps, if this holds for it: for the next one, which is over later.
    #[inline]
    pub(crate) fn take_newest_kept_if(&mut self, is_same: impl FnOnce(&K) -> bool) -> Option<K> {
        let Place(_, kept) = &mut self.all[self.under_way.checked_sub(1)?];
        kept.take_if(|kept| is_same(kept))
    }

    /// Adds the newest order, of this message; `make` makes those of this queue.
    #[inline]
    pub(crate) fn add(
        &mut self,
        message: Message,
        kept: K,
        make: impl FnOnce(Message) -> Order,
    ) -> Arc<Order> {
        let at = self.under_way;
        self.under_way += 1;
        let Some(Place(order, keeps)) = self.all.get_mut(at) else {
            let order = Arc::new(make(message));
            self.all.push_back(Place(order.clone(), Some(kept)));
            return order;
        };
        match Arc::get_mut(order) {
            Some(free) => free.renew(message),
            None => *order = Arc::new(make(message)),
        }
        *keeps = Some(kept);
        order.clone()
    }

    /// Lets go of the newest orders for which this holds.
    pub(crate) fn drop_newest(&mut self, mut is_gone: impl FnMut(&Order) -> bool) {
        while self.newest().is_some_and(|order| is_gone(order)) {
            self.under_way -= 1;
            let kept = self.all[self.under_way].1.take();
            // To the one that it had it from.
            if let Some(before) = self.under_way.checked_sub(1)
                && let Place(_, none @ None) = &mut self.all[before]
            {
                *none = kept;
            }
        }
    }

    /// Lets go of what is complete, and keeps what came of it.
    pub(crate) fn settle(&mut self) {
        while self.oldest().is_some_and(|order| order.keep()) {
            self.drop_oldest();
        }
    }

    /// Somebody has seen that `order` is complete, with so many bytes: so are those before it.
    #[inline]
    pub(crate) fn finish(&mut self, order: &Arc<Order>, bytes: usize) {
        match self.oldest() {
            Some(oldest) if Arc::ptr_eq(oldest, order) => {
                order.kept.set(bytes);
                self.drop_oldest();
            }
            Some(oldest) if oldest.index() <= order.index() => self.settle(),
            // By whoever has seen a later one, too.
            _ => {}
        }
    }

    #[inline]
    fn drop_oldest(&mut self) {
        if let Some(Place(order, _)) = self.all.pop_front() {
            self.under_way -= 1;
            self.all.push_back(Place(order, None));
        }
    }
}
