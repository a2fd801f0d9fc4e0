//! A place in a JSON file: what is not there is told with its path.

use serde_json::Value as Json;

use super::{Micros, Shape};

type Result<T> = std::result::Result<T, Shape>;

/// A value and where it is.
#[derive(Clone)]
pub(super) struct Node<'a> {
    value: &'a Json,
    path: String,
}

impl<'a> Node<'a> {
    pub(super) fn root(value: &'a Json) -> Self {
        Self { value, path: String::new() }
    }

    fn inside(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The value of a key, if there is one and it is not null.
    pub(super) fn find(&self, key: &str) -> Option<Node<'a>> {
        let value = self.value.get(key).filter(|value| !value.is_null())?;
        Some(Self { value, path: self.inside(key) })
    }

    pub(super) fn get(&self, key: &str) -> Result<Node<'a>> {
        self.find(key).ok_or_else(|| Shape::Lacks(self.inside(key)))
    }

    fn expected(&self, what: &'static str) -> Shape {
        Shape::Expected { path: self.path.clone(), what }
    }

    /// The elements of the list of this name.
    pub(super) fn list(&self, key: &str) -> Result<Vec<Node<'a>>> {
        let list = self.get(key)?;
        let elements = list.value.as_array().ok_or_else(|| list.expected("a list"))?.iter().enumerate();
        Ok(elements.map(|(i, value)| Self { value, path: format!("{}[{i}]", list.path) }).collect())
    }

    /// The keys of an object, and their values.
    pub(super) fn fields(&self) -> Vec<(String, Node<'a>)> {
        let fields = self.value.as_object().into_iter().flatten();
        fields.map(|(key, value)| (key.clone(), Self { value, path: self.inside(key) })).collect()
    }

    pub(super) fn text(&self, key: &str) -> Result<&'a str> {
        let node = self.get(key)?;
        node.value.as_str().ok_or_else(|| node.expected("a text"))
    }

    /// Text as it is, anything else as JSON writes it.
    pub(super) fn words(&self) -> String {
        self.value.as_str().map_or_else(|| self.value.to_string(), str::to_owned)
    }

    pub(super) fn count(&self, key: &str) -> Result<u64> {
        let node = self.get(key)?;
        node.value.as_u64().ok_or_else(|| node.expected("a whole number that is not negative"))
    }

    pub(super) fn number(&self, key: &str) -> Result<f64> {
        let node = self.get(key)?;
        node.value.as_f64().filter(|number| number.is_finite()).ok_or_else(|| node.expected("a number"))
    }

    /// A number that may be absent, but must not be anything else.
    pub(super) fn number_if_any(&self, key: &str) -> Result<Option<f64>> {
        self.find(key).map(|_| self.number(key)).transpose()
    }

    /// Percentiles in this object itself.
    pub(super) fn micros_here(&self) -> Result<Micros> {
        Ok(Micros { min: self.number("min")?, p50: self.number("p50")?, p99: self.number("p99")? })
    }

    /// Percentiles in the object of this name.
    pub(super) fn micros(&self, key: &str) -> Result<Micros> {
        self.get(key)?.micros_here()
    }
}
