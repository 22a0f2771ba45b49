from tests.support.remote import nothing_of_the_users, site

__all__ = ["nothing_of_the_users", "site"]
